"""NVML: real binding, captures and their replay."""

from .real import RealNvml
from .replay import ReplayNvml

Nvml = RealNvml | ReplayNvml
