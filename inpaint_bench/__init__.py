"""Benchmarking the fine-tuning of diffusion models across GPUs and Slurm sites."""

__version__ = "0.1.0"
