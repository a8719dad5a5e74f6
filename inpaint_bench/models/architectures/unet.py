"""The UNet of Stable Diffusion 1 and 2."""

from .base import Architecture

ARCHITECTURE = Architecture()
