"""What the folder of a GPU vendor gives to the sidecar: readings by name, and why one is missing.

A reading's name ends in its unit (`power_instant_mw`), or its line in `sampling.streams` says it. Numbers of fields and
return codes stay in the vendor's folder; an error only carries its code, for telemetry.json and captures.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Any, Final, NamedTuple, Protocol

from inpaint_bench.core.schema import Null
from inpaint_bench.telemetry.report import CaptureMeta

Handle = Any  # an open GPU, as the vendor's folder represents it

# The driver or the card will not offer the call later either.
NEVER_SUPPORTED: Final = frozenset({Null.NOT_SUPPORTED, Null.DRIVER_TOO_OLD, Null.NOT_IN_CAPTURE})
# What a reading `recovery_action` counts: the driver's hint.
RECOVERY_ACTIONS: Final = (
    *("none", "gpu_reset", "node_reboot", "drain_p2p", "drain_and_reset"),
    *("recover_imex_domain", "bus_reset", "system_reboot"),
)


class Fault(Enum):
    """What an error says beyond its own call."""

    NO_DRIVER = "this machine has no working driver"
    DRIVER_REPLACED = "all later calls of this process fail too"
    BROKEN = "the driver gave nothing, and may again"
    UNKNOWN_GPU = "there is no GPU of this UUID"


class DriverError(Exception):
    """A call failed: why its readings are null, in the vendor's words too."""

    def __init__(self, call: str, text: str, reason: Null, code: int, fault: Fault | None = None) -> None:
        super().__init__(f"{call}: {text}")
        self.text, self.reason, self.code, self.fault = text, reason, code, fault


class Value(NamedTuple):
    """One reading: its value, or why there is none."""

    value: float | None
    error: DriverError | None = None
    latency_us: int = 0  # as the driver reports it


class CounterWindow(NamedTuple):
    """Means over the time since the previous read, one per requested counter."""

    window_ms: float
    values: list[Value]


class Xid(NamedTuple):
    """An error that the driver reported; uuid is None if the GPU no longer gives its UUID."""

    uuid: str | None
    number: int


class Driver(Protocol):
    """The GPUs of this machine, opened by UUID. Every method may raise DriverError; none returns a substitute value."""

    def open(self) -> None: ...

    def close(self) -> None: ...

    def driver_version(self) -> str: ...

    def library_version(self) -> str: ...

    def uuids(self) -> list[str]:
        """Return the UUIDs of the GPUs that this process may open."""

    def device(self, uuid: str) -> Handle: ...

    def uuid(self, handle: Handle) -> str: ...

    def query(self, handle: Handle, name: str) -> Any:
        """Return a number, a text, or a tuple of numbers."""

    def fields(self, handle: Handle, names: Sequence[str]) -> list[Value]:
        """Return readings that one call gives."""

    def counters(self, handle: Handle, names: Sequence[str]) -> CounterWindow | None:
        """Return performance counters over the time since the last call; None if there is no window yet."""

    def compute_processes(self, handle: Handle) -> list[int]:
        """Return the ids of the processes with a compute context."""

    def watch_xids(self, handle: Handle) -> None:
        """Collect the errors of a GPU from now on."""

    def next_xid(self) -> Xid | None:
        """Return the next collected error, None if there is none. Does not wait."""


class Source(NamedTuple):
    """What a vendor's `open_source` returns: the value of the `source` column, and the GPUs to sample."""

    name: str
    driver: Driver
    uuids: list[str]
    capture: CaptureMeta | None = None  # what is replayed


class PowerLimiter(Protocol):
    """A driver that sets power limits."""

    def device(self, uuid: str) -> Handle: ...

    def power_limit_mw(self, handle: Handle) -> int:
        """Return the limit that root set, or the default."""

    def power_limit_range_mw(self, handle: Handle) -> tuple[int, int]:
        """Return the least and the highest limit that the card takes."""

    def set_power_limit_mw(self, handle: Handle, limit: int) -> None:
        """Set the limit. Only root may."""
