"""Submit points: a sweep from Hydra, a plan file, a rerun by failure reason, further repetitions."""
