"""Figures of a report, as Vega-Lite charts."""
