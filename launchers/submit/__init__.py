"""Sending points: a sweep from Hydra, a plan, a rerun by cause, further repetitions."""
