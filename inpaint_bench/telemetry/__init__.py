"""GPU telemetry: a sidecar process that samples NVML into Parquet parts, and what reads and replays it.

Nothing here imports torch, diffusers or hydra: the sidecar must be sampling well within a second.
"""
