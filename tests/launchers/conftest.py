from collections.abc import Callable

import pytest

from launchers.points.compose import composer
from launchers.points.point import Point

ACCOUNT = "sites.delta.account.value=bbxx-delta-gpu"


@pytest.fixture
def points() -> Callable[..., list[Point]]:
    """Placed points, one per argument; an argument is a line of overrides."""

    def make(*lines: str) -> list[Point]:
        with composer() as compose:
            return [compose(num, line.split()) for num, line in enumerate(lines)]

    return make
