"""Fine-tuning the UNet of Stable Diffusion to make images of texts: the same training, with models without masks."""

from .finetune_inpaint import build as build
