"""Sets the power limit of GPUs for a run, and back to what it was when the sidecar ends."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Sequence

from inpaint_bench.core.schema import Null
from inpaint_bench.telemetry.driver import DriverError, Handle, PowerLimiter


class PowerLimits:
    """Limits that this process has set. After SIGKILL nobody sets them back."""

    def __init__(self, driver: PowerLimiter, uuids: Sequence[str], watts: float) -> None:
        """Set the limit of GPUs. Raises ValueError if a card does not take it or the user may not set it."""
        self._driver = driver
        self._before: list[tuple[Handle, int]] = []  # mW
        atexit.register(self.restore)  # if the sidecar fails to start
        key = f"telemetry.power_limit_w={watts:g}"
        for uuid in uuids:
            handle = driver.device(uuid)
            try:
                before, (least, most) = driver.power_limit_mw(handle), driver.power_limit_range_mw(handle)
                if not least <= 1000 * watts <= most:
                    raise ValueError(f"{key}: {uuid} takes {least / 1000:g} to {most / 1000:g} W")
                driver.set_power_limit_mw(handle, round(1000 * watts))
            except DriverError as error:
                if error.reason is not Null.NO_PERMISSION:
                    raise ValueError(f"{key}: the limit of {uuid} cannot be set ({error})") from None
                raise ValueError(
                    f"{key}: only root may set the power limit of {uuid}; leave the key out, or ask the site to set it"
                ) from None
            self._before.append((handle, before))

    def restore(self) -> None:
        """Set all limits back, while the driver is open."""
        while self._before:
            handle, before = self._before.pop()
            with contextlib.suppress(DriverError):  # a GPU that is lost has no limit
                self._driver.set_power_limit_mw(handle, before)
