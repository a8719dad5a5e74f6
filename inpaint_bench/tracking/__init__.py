"""Curves and pictures of a run for experiment trackers, by a process that reads what the run writes anyway."""
