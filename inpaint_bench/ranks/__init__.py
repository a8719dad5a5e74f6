"""Several processes of one run: the place and device of each, how they meet, and how one that is lost ends the run."""
