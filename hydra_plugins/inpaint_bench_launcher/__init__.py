"""Hydra accepts launchers only from under `hydra_plugins`; ours lives in `launchers`."""
