"""NVML: protocol, real binding, captures and their replay."""
