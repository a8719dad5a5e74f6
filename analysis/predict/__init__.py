"""Predictions of speed as records that a report scores when their cells are measured."""
