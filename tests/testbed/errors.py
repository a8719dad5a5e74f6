"""The one exception whose text is meant for the person at the terminal."""


class BedError(RuntimeError):
    """The bed cannot do what was asked; the message says why and what to do."""


class PortsTakenError(BedError):
    """A port of the bed's range is in use; another range may do."""


class PackagesError(BedError):
    """Slurm's packages are missing and cannot be had here."""
