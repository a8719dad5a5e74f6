"""A group of points as a job of Slurm or of this machine: rendered, queued, asked after."""
