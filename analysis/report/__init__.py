"""Render tables, figures and the page of a report."""
