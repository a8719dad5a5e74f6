"""The sample streams: what is read at which rate, and how one read becomes a row of the table.

fast: power, utilisation, and in some rows the energy counter. slow: the rest. gpm: the counters of Hopper and later, as
means over the whole interval. A value that the hardware does not give is null, and the row's `nulls` says why; it is
never zero. Process lists and PCIe throughput are left out, because they take milliseconds under the driver's lock.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import pyarrow as pa

from inpaint_bench.core.config.bench import TelemetryConfig
from inpaint_bench.core.schema import Null
from inpaint_bench.core.tables import SCHEMAS
from inpaint_bench.telemetry.driver import NEVER_SUPPORTED, Driver, DriverError, Handle, Value

ENERGY: Final = "energy_mj"
# Reads at the start of a run that all ask for the energy counter: they show how often the card updates it.
ENERGY_READS: Final = 20
UNFIT: Final = -2  # in the place of a return code: no card measures such a value
PROBES: Final = 3  # reads after which a sensor that was missing in all of them counts as absent
MIB: Final = 2**20
# Least and largest value by the unit that a column's name ends with. Sensors that fail give 255 degrees, 65,535 MHz or
# 4,294,967 W, and utilisations of thousands of percent were seen on H100 cards.
LIMITS: Final = {"pct": (0, 101), "c": (-20, 130), "mhz": (1, 50_000), "w": (0, 10_000), "mib": (0, 2**21)}


@dataclass(frozen=True)
class Query:
    """A reading of the driver, and the columns that it feeds: of its own name, or others, perhaps in another unit."""

    name: str
    others: tuple[str, ...] = ()
    scale: float = 1  # from the reading's unit to the columns'

    @property
    def columns(self) -> tuple[str, ...]:
        return self.others or (self.name,)


@dataclass(frozen=True, kw_only=True)
class SampleStream:
    """Columns of one table that are read together, at one rate."""

    name: str
    fields: tuple[Query, ...] = ()
    queries: tuple[Query, ...] = ()
    gpm: tuple[Query, ...] = ()

    @property
    def table(self) -> str:
        return f"samples_{self.name}"


FAST: Final = SampleStream(
    name="fast",
    fields=(
        Query("power_instant_mw", ("power_instant_w",), 1e-3),
        Query("power_avg1s_mw", ("power_avg1s_w",), 1e-3),
        Query(ENERGY),
    ),
    queries=(Query("utilization", ("gpu_util_pct", "mem_active_pct")),),
)

SLOW: Final = SampleStream(
    name="slow",
    fields=(
        Query("power_mem_avg_mw", ("power_mem_avg_w",), 1e-3),
        Query("temp_mem_c"),
        Query("throttle_power_cap_ns"),
        Query("throttle_sw_thermal_ns"),
        Query("throttle_hw_thermal_ns"),
        Query("throttle_power_brake_ns"),
    ),
    queries=(
        Query("sm_clock_mhz"),
        Query("mem_clock_mhz"),
        Query("throttle_reasons"),
        Query("temperature_c", ("temp_gpu_c",)),
        Query("memory", ("vram_total_mib", "vram_reserved_mib", "vram_used_mib", "vram_free_mib"), scale=1 / MIB),
    ),
)

WINDOW: Final = "window_ms"  # column of the gpm stream: the length of the interval
GPM_MAX_HZ: Final = 5.0  # a GPM window is longer than 100 ms
GPM: Final = SampleStream(
    name="gpm",
    gpm=(
        Query("sm_active_pct"),
        Query("sm_occupancy_pct"),
        Query("tensor_active_pct"),
        Query("dram_active_pct"),
        Query("pcie_tx_mib_s"),
        Query("pcie_rx_mib_s"),
        Query("nvlink_tx_mib_s"),
        Query("nvlink_rx_mib_s"),
    ),
)

STREAMS: Final = (FAST, SLOW, GPM)


def stream_rates(settings: TelemetryConfig) -> dict[str, float]:
    """Return the rate of each stream in Hz. gpm has that of slow, at most what leaves it a window."""
    return {FAST.name: settings.fast_hz, SLOW.name: settings.slow_hz, GPM.name: min(settings.slow_hz, GPM_MAX_HZ)}


# A number that does not fit its column would make the whole batch fail to convert, losing every row in it.
_UNSIGNED_COLUMNS: Final = frozenset(
    sensor.columns[0]
    for stream in STREAMS
    for sensor in stream.fields
    if pa.types.is_unsigned_integer(SCHEMAS[stream.table].field(sensor.columns[0]).type)
)


@dataclass
class Reading:
    """One read of one stream on one GPU. A column is in `values` or, with what failed, in `errors`."""

    t_mono_ns: int  # middle of the read
    t_unix_ns: int
    read_us: float
    values: dict[str, float] = field(default_factory=dict)
    errors: dict[str, DriverError] = field(default_factory=dict)
    not_due: Collection[str] = ()  # columns that were not asked for

    @property
    def nulls(self) -> str | None:
        """Return the text of the `nulls` column, None if there is nothing to explain."""
        reasons = dict.fromkeys(self.not_due, Null.NOT_DUE)
        reasons |= {column: error.reason for column, error in self.errors.items()}
        return ";".join(f"{column}={reason.value}" for column, reason in sorted(reasons.items())) or None

    def row(self, gpu_uuid: str, source: str, seq: int) -> dict[str, Any]:
        """Return the row of the table, without run_id."""
        head = {"gpu_uuid": gpu_uuid, "source": source, "tick_seq": seq, "nulls": self.nulls}
        times = {"t_mono_ns": self.t_mono_ns, "t_unix_ns": self.t_unix_ns, "read_us": self.read_us}
        return {**head, **times, **self.values}


class StreamReader:
    """Reads one stream of one GPU, and learns which sensors the card does not have.

    A sensor is absent if it was not supported in the first three reads; it is then not queried any more. A later
    NOT_SUPPORTED makes the value null for that tick, is counted, and the sensor is queried again.
    """

    def __init__(self, stream: SampleStream) -> None:
        self.stream = stream
        self.absent: dict[str, DriverError] = {}
        self.errors: Counter[tuple[str, int]] = Counter()  # (column, the driver's code)
        self.reads = 0
        self._misses: Counter[str] = Counter()

    def read(self, driver: Driver, handle: Handle, not_due: Collection[str] = ()) -> Reading | None:
        """Query the GPU, without the columns `not_due`; None if GPM has no window yet. Failures are in the reading."""
        # Both clocks: the monotonic one is shared with the worker on this host, the wall clock compares hosts.
        unix_ns, start_ns = time.time_ns(), time.monotonic_ns()
        results = self._query_all(driver, handle, not_due)
        duration_ns = time.monotonic_ns() - start_ns
        if results is None:
            return None
        # The middle is at most half the duration away from when the driver took the values. Sensors that are no longer
        # queried keep their error, so that every row explains its nulls.
        half_ns = duration_ns // 2
        times = start_ns + half_ns, unix_ns + half_ns, duration_ns / 1000
        reading = Reading(*times, errors=dict(self.absent), not_due=not_due)
        for column, result in results.items():
            error = _validate(column, result)
            if error or result.value is None:
                reading.errors[column] = error or _unfit(column, Null.ERROR)
            else:
                reading.values[column] = result.value
        self._learn(reading.errors)
        return reading

    def _query_all(self, driver: Driver, handle: Handle, not_due: Collection[str]) -> dict[str, Value] | None:
        """Return the results by column, without absent sensors; None if GPM has no window yet."""
        results: dict[str, Value] = {}
        for columns, ask in self._questions(driver, handle, not_due):
            try:
                values = ask()
            except DriverError as error:  # the columns of one call fail together
                # Without its traceback, whose frames would hold this reading.
                values = [Value(None, error.with_traceback(None))] * len(columns)
            if values is None:
                return None
            results |= zip(columns, values, strict=True)
        return results

    def _questions(
        self, driver: Driver, handle: Handle, not_due: Collection[str]
    ) -> Iterator[tuple[Sequence[str], Callable[[], list[Value] | None]]]:
        """Yield the columns that one call of the driver feeds, and that call."""
        if fields := [sensor for sensor in self._present(self.stream.fields) if sensor.columns[0] not in not_due]:
            yield [sensor.columns[0] for sensor in fields], partial(_query_fields, driver, handle, fields)
        for query in self._present(self.stream.queries):
            yield query.columns, partial(_query, driver, handle, query)
        if metrics := self._present(self.stream.gpm):
            yield [WINDOW, *(sensor.columns[0] for sensor in metrics)], partial(_query_gpm, driver, handle, metrics)

    def _present(self, sensors: Sequence[Query]) -> list[Query]:
        # The columns of one query are absent together: the first one stands for all.
        return [sensor for sensor in sensors if sensor.columns[0] not in self.absent]

    def _learn(self, errors: dict[str, DriverError]) -> None:
        # Only the first reads count: polling too fast gives spurious NOT_SUPPORTED later.
        self.reads += 1
        for column, error in errors.items():
            if column in self.absent:
                continue
            self.errors[column, error.code] += 1
            if self.reads <= PROBES and error.reason in NEVER_SUPPORTED:
                self._misses[column] += 1
                if self._misses[column] == PROBES:
                    self.absent[column] = error


def _query_fields(driver: Driver, handle: Handle, sensors: Sequence[Query]) -> list[Value]:
    results = driver.fields(handle, [sensor.name for sensor in sensors])
    return [_scaled(result, sensor.scale) for sensor, result in zip(sensors, results, strict=True)]


def _query_gpm(driver: Driver, handle: Handle, sensors: Sequence[Query]) -> list[Value] | None:
    window = driver.counters(handle, [sensor.name for sensor in sensors])
    return window and [Value(window.window_ms), *window.values]


def _query(driver: Driver, handle: Handle, query: Query) -> list[Value]:
    result = driver.query(handle, query.name)
    numbers = result if len(query.columns) > 1 else (result,)
    return [_scaled(Value(number), query.scale) for number in numbers]


def _scaled(result: Value, scale: float) -> Value:
    return result if result.value is None or scale == 1 else result._replace(value=result.value * scale)


def _validate(column: str, result: Value) -> DriverError | None:
    """Return the result's error, or one of our own if no card gives such a value, or it does not fit its column."""
    value = result.value
    low, high = LIMITS.get(column.rpartition("_")[2], (-math.inf, math.inf))
    if result.error or value is None:
        return result.error
    if not low <= value <= high:
        return _unfit(column, Null.OUT_OF_RANGE)
    if column in _UNSIGNED_COLUMNS and (value < 0 or value != int(value)):
        return _unfit(column, Null.ERROR)
    return None


def _unfit(column: str, reason: Null) -> DriverError:
    return DriverError(column, reason.value.replace("_", " "), reason, UNFIT)
