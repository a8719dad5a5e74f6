"""Compute and audit the row of one run."""
