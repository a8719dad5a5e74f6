"""Training a network on labelled volumes."""

from . import volumes

build = volumes.VolumeTraining
