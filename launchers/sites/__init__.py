"""Compare site files with their live Slurm, correct them, and probe a compute node."""
