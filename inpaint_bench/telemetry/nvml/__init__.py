"""NVML: protocol, real binding, recording and replay."""
