"""What a run will need: memory, rate and energy, from the tables here that scripts of benchmarks/ write."""

import csv
from pathlib import Path

FOLDER = Path(__file__).parent


def rows(name: str) -> list[dict[str, str]]:
    """Return a table of this folder."""
    with (FOLDER / name).open(newline="") as file:
        return list(csv.DictReader(file))
