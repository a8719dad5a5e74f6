"""A site file beside its live Slurm: asked, compared, mended, probed."""
