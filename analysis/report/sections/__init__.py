"""Sections of a report: what each says about a dataset, as tables and sentences."""
