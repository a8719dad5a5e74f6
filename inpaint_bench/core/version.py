"""The version, in a module of its own: the package itself imports what is above everything else."""

__version__ = "0.2.0"
