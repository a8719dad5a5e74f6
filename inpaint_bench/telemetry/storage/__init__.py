"""Parquet parts and their crash-safe journal."""
