"""FID and CLIP score of a model at one guidance."""

from . import sd_inference

build = sd_inference.FidClip
