"""Slurm: render and submit arrays, query jobs; jobs on this machine without Slurm."""
