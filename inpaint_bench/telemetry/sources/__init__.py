"""Sources beside NVML's samples: dcgm-exporter, other processes, health checks."""
