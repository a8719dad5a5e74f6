"""NVML played from a capture file, for machines without a GPU.

A capture holds what one GPU returned, call by call, failures included. It is gzipped JSON, `NAME.json.gz`, recorded by
`doctor gpu --out` or made up (`synthetic`), and holds no UUID, no serial number and no process id. Keys of `calls`:

    driver_version, nvml_version     NVML's own
    name, utilization, ...           queries, see `real.QUERIES`
    field:<id>:<scope>               elements of field queries
    fields:<id>:<scope>,...          the duration of such a query
    gpm:<metric>, gpm_window_ms      elements of GPM reads, and the length of their window
    compute_processes, xids          whether a process list is given, and whether Xids can be watched for; not replayed

Replayed rows cannot be taken for measurements: the UUID is REPLAY-<capture>, and the source is replay:<capture>.
Recorded failures fail again with their code, and calls that were not recorded fail with NOT_IN_CAPTURE, as do process
lists and Xids: they say nothing of the replaying machine. At its end the capture restarts from its loop point, and
cumulative counters continue at the rate of the loop.
"""

import gzip
import time
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import pynvml

from inpaint_bench.core.files import replace_bytes
from inpaint_bench.core.records import decode_record
from inpaint_bench.telemetry.driver import CounterWindow, Handle, Value, Xid
from inpaint_bench.telemetry.report import CaptureMeta

from .real import FIELDS, METRICS, NOT_IN_CAPTURE, NvmlError, nvml_value

FORMAT: Final = 1
SUFFIX: Final = ".json.gz"
PACKAGED: Final = Path(__file__).parent / "captures"


def field_key(name: str) -> str:
    """Return the key of one of FIELDS."""
    return "field:{}:{}".format(*FIELDS[name])


def gpm_key(name: str) -> str:
    """Return the key of one of METRICS."""
    return f"gpm:{METRICS[name]}"


class Series(msgspec.Struct, omit_defaults=True):
    """The results of one call over time."""

    t_ms: list[float]  # since the start of the recording
    code: int | list[int]  # NVML return code; one number if it never changed
    value: list[Any]
    us: list[float] = []  # how long each call took; for a field, as the driver reports it

    def at(self, t_ms: float) -> tuple[int, Any]:
        """Return code and value of the last result at or before `t_ms` (the first one, if earlier)."""
        # A value holds until the next recorded one, as it does between two polls of a sensor.
        index = max(0, bisect_right(self.t_ms, t_ms) - 1)
        return self.codes[index], self.value[index]

    @property
    def codes(self) -> list[int]:
        return [self.code] * len(self.t_ms) if isinstance(self.code, int) else self.code


class Capture(msgspec.Struct, kw_only=True):
    """A capture file."""

    format: int
    meta: CaptureMeta
    calls: dict[str, Series]


def available() -> list[str]:
    """Return the names of the packaged captures."""
    return sorted(path.name.removesuffix(SUFFIX) for path in PACKAGED.glob(f"*{SUFFIX}"))


def load(name: str) -> Capture:
    """Read a packaged capture by its name, or any capture by its path. Raises ValueError."""
    path = Path(name) if name.endswith(SUFFIX) else PACKAGED / f"{name}{SUFFIX}"
    if not path.is_file():
        raise ValueError(f"no capture {name!r}; available: {', '.join(available()) or 'none'}")
    try:
        capture = decode_record(gzip.decompress(path.read_bytes()), Capture)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} is not a readable capture: {error}") from None
    if capture.format != FORMAT:
        raise ValueError(f"{path} has capture format {capture.format}, this version reads {FORMAT}")
    # Replay divides by the length of the loop.
    if not 0 <= capture.meta.loop_from_ms < capture.meta.duration_ms:
        raise ValueError(f"{path}: loop_from_ms must lie within the capture")
    capture.meta.name = path.name.removesuffix(SUFFIX)
    return capture


def save(path: Path, capture: Capture) -> None:
    """Write a capture atomically; equal content gives equal bytes."""
    replace_bytes(path, gzip.compress(msgspec.json.encode(capture), mtime=0))


# --- playing one ---------------------------------------------------------------------------------

_ENERGY_FIELD: Final = field_key("energy_mj")
_CUMULATIVE: Final = {
    *("total_energy_mj", _ENERGY_FIELD),
    *(field_key(name) for name in FIELDS if name.startswith("throttle_")),
}


class ReplayNvml:
    """RealNvml over `num_devices` copies of the captured GPU, which all return the same values at the same time.

    They are numbered from `first` on; only the copy 0 has the captured GPU's own name.
    `read_us` of the rows is the replay's own time, not the GPU's.
    """

    def __init__(self, capture: Capture, num_devices: int = 1, first: int = 0) -> None:
        self._capture = capture
        name = f"REPLAY-{capture.meta.name}"
        self._uuids = [f"{name}-{index}" if index else name for index in range(first, first + num_devices)]
        self._start_ns = time.monotonic_ns()
        self._last_gpm_ns: dict[str, int] = {}  # by UUID
        self._loop_gain = {key: self._gain(key) for key in _CUMULATIVE & capture.calls.keys()}

    def _gain(self, key: str) -> int:
        """Return how much a cumulative counter grows in one loop."""
        first_ms, last_ms = self._capture.meta.loop_from_ms, self._capture.meta.duration_ms
        series = self._capture.calls[key]
        results = zip(series.t_ms, series.codes, series.value, strict=True)
        valid = [(t, value) for t, code, value in results if t >= first_ms and code == 0]
        if len(valid) < 2:
            return 0
        # Between the last result and the end of the capture the counter grows at the loop's mean rate.
        (t0, v0), (t1, v1) = valid[0], valid[-1]
        return max(0, round((v1 - v0) * (last_ms - first_ms) / (t1 - t0)))

    def _result(self, key: str) -> tuple[int, Any]:
        series = self._capture.calls.get(key)
        if series is None:
            return NOT_IN_CAPTURE, None
        meta, t_ms, loops = self._capture.meta, (time.monotonic_ns() - self._start_ns) / 1e6, 0
        # Beyond the end of the capture: this many loops, and the rest of the last one from the loop point on.
        if t_ms >= meta.duration_ms:
            num_loops, rest_ms = divmod(t_ms - meta.loop_from_ms, meta.duration_ms - meta.loop_from_ms)
            loops, t_ms = int(num_loops), meta.loop_from_ms + rest_ms
            # A result from before the loop point would make a counter step back.
            t_ms = max(t_ms, next((t for t in series.t_ms if t >= meta.loop_from_ms), t_ms))
        code, value = series.at(t_ms)
        if code == 0 and loops and key in self._loop_gain:
            value += loops * self._loop_gain[key]
        return code, value

    def _get(self, key: str) -> Any:
        code, value = self._result(key)
        if code != 0:
            raise NvmlError(code, f"replay of {key}")
        return value

    def open(self) -> None: ...

    def close(self) -> None: ...

    def driver_version(self) -> str:
        return str(self._get("driver_version"))

    def library_version(self) -> str:
        return str(self._get("nvml_version"))

    def uuids(self) -> list[str]:
        return list(self._uuids)

    def device(self, uuid: str) -> Handle:
        if uuid not in self._uuids:
            raise NvmlError(pynvml.NVML_ERROR_NOT_FOUND, f"replay of {uuid}")
        return uuid

    def uuid(self, handle: Handle) -> str:
        return str(handle)  # the handle of a replayed GPU is its UUID

    def query(self, handle: Handle, name: str) -> Any:
        # The field holds the same counter as the call, and is recorded at 10 Hz where the call is recorded once.
        same_counter = name == "total_energy_mj" and _ENERGY_FIELD in self._capture.calls
        return self._get(_ENERGY_FIELD if same_counter else name)

    def fields(self, handle: Handle, names: Sequence[str]) -> list[Value]:
        return [self._value(field_key(name)) for name in names]

    def counters(self, handle: Handle, names: Sequence[str]) -> CounterWindow | None:
        values = [self._value(gpm_key(name)) for name in names]
        # A card without GPM refuses the call, not its metrics.
        errors = [value.error for value in values if value.error]
        if errors and len(errors) == len(values):
            raise errors[0]
        now_ns = time.monotonic_ns()
        last_ns, self._last_gpm_ns[handle] = self._last_gpm_ns.get(handle), now_ns
        if last_ns is None:  # as on a card, the first read has no window
            return None
        code, window_ms = self._result("gpm_window_ms")
        return CounterWindow(float(window_ms) if code == 0 else (now_ns - last_ns) / 1e6, values)

    def _value(self, key: str) -> Value:
        return nvml_value(*self._result(key), f"replay of {key}")

    def compute_processes(self, handle: Handle) -> list[int]:
        raise NvmlError(NOT_IN_CAPTURE, "replay of compute_processes")

    def watch_xids(self, handle: Handle) -> None:
        raise NvmlError(NOT_IN_CAPTURE, "replay of xids")

    def next_xid(self) -> Xid | None:
        return None
