"""State of a sweep: poll its sources, resolve and forecast, show."""
