"""Fine-tuning the UNet of Stable Diffusion to make images of texts: the same training, with a model that has no mask."""

from .finetune_inpaint import build as build
