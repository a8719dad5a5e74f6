"""Sites whose Slurm this machine cannot call: reached over ssh, or by tar files that a person carries."""
