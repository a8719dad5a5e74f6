"""Making volumes of segmentations."""

from . import volumes

build = volumes.VolumeSampling
