"""Sites whose Slurm this machine cannot call: reached over ssh, or by a plan file that a person copies there."""
