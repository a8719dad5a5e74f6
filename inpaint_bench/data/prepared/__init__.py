"""Prepared datasets: layout, formats, writing, reading, staging."""
