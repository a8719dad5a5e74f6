"""Exceptions whose message is meant for the user."""


class BedError(RuntimeError):
    """The test bed cannot do what was requested; the message says why and what to do."""


class PortsTakenError(BedError):
    """A port of the bed's range is in use; another range may be free."""


class PackagesError(BedError):
    """Slurm's packages are missing and cannot be installed."""
