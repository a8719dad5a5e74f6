"""From the points of a sweep to submitted jobs."""
