"""What a machine, a GPU, a site file and a compute node are, asked of themselves: `doctor`."""

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    from .command import main as examine  # not loaded by the job of a probe

    return examine(argv)
