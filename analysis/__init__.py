"""From run directories to tables, figures and a report. Imports neither torch nor hydra nor diffusers."""
