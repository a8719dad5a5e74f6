"""Compare site files with their live Slurm, and correct them."""
