"""GPU counters from a site's dcgm-exporter, for cards without GPM (A40, A100).

The exporter's page carries no times. It renews its values at an interval of its own (30 s by default), and a value is a
mean over at most one such interval. So a row is written only for values that replaced others, and its `window_ms` is a
bound on how far back they reach, where for GPM it is the length of the mean.

The format is Prometheus text; a metric is named after DCGM's field. DCGM 4.6 renamed fields and kept the old names as
aliases, so both are accepted. Units are DCGM's (ratios, bytes per second), whatever type the site's counter file gives.
"""

from __future__ import annotations

import http.client
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from prometheus_client.parser import text_string_to_metric_families

from inpaint_bench.core.config.validation import Endpoint
from inpaint_bench.core.schema import PRODUCER, Null
from inpaint_bench.core.telemetry_records import DcgmReport
from inpaint_bench.telemetry.runtime import log
from inpaint_bench.telemetry.sampling.streams import GPM, WINDOW, nulls_column

if TYPE_CHECKING:
    from inpaint_bench.telemetry.devices import DeviceState

TIMEOUT_S: Final = 2.0  # of the connection and of each read
BODY_TIMEOUT_S: Final = 5.0
MAX_BYTES: Final = 4 * 2**20  # eight GPUs with every field are well below 1 MiB
MAX_BACKOFF_S: Final = 60.0
STALE_S: Final = 90.0  # three of the exporter's default intervals
FIRST_SEQ: Final = 2**31  # the gpm stream counts from 0, and (GPU, tick_seq) must identify a row
_JOIN_S: Final = 0.2  # after SIGTERM, the sidecar has less than a second in all

_RATIO: Final = (100.0, 1.01)  # to percent; slightly above 1 is rounding, more is another unit
_RATE: Final = (2.0**-20, 2.0**47)  # to MiB/s; DCGM's markers for "no value" are numbers from 2^47 on


@dataclass(frozen=True)
class DcgmMetric:
    """A column of samples_gpm that is fed by a DCGM field: value * factor, if 0 <= value < limit."""

    column: str
    names: tuple[str, ...]
    factor: float
    limit: float


METRICS: Final = (
    DcgmMetric("sm_active_pct", ("DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_PROF_SM_UTIL_RATIO"), *_RATIO),
    DcgmMetric("sm_occupancy_pct", ("DCGM_FI_PROF_SM_OCCUPANCY", "DCGM_FI_PROF_SM_OCCUPANCY_RATIO"), *_RATIO),
    DcgmMetric("tensor_active_pct", ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "DCGM_FI_PROF_TENSOR_UTIL_RATIO"), *_RATIO),
    DcgmMetric("dram_active_pct", ("DCGM_FI_PROF_DRAM_ACTIVE", "DCGM_FI_PROF_DRAM_UTIL_RATIO"), *_RATIO),
    DcgmMetric("pcie_tx_mib_s", ("DCGM_FI_PROF_PCIE_TX_BYTES",), *_RATE),
    DcgmMetric("pcie_rx_mib_s", ("DCGM_FI_PROF_PCIE_RX_BYTES",), *_RATE),
    DcgmMetric("nvlink_tx_mib_s", ("DCGM_FI_PROF_NVLINK_TX_BYTES",), *_RATE),
    DcgmMetric("nvlink_rx_mib_s", ("DCGM_FI_PROF_NVLINK_RX_BYTES",), *_RATE),
)

Values = Mapping[str, float]  # metric name: value as exported, or _INVALID
_INVALID: Final = -1.0  # NaN, or two series that contradict each other


class ScrapeError(Exception):
    """The exporter gave no usable response."""


class _RefuseRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        raise ScrapeError(f"it redirects to {newurl[:200]}, which is not followed")


# No proxy of the environment: the exporter runs on the node or beside it.
_OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}), _RefuseRedirects)


def scrape(endpoint: Endpoint) -> str:
    """Return the text of the exporter's page, bounded in time and size. Raises ScrapeError."""
    request = urllib.request.Request(endpoint.url, headers={"Accept": "text/plain", "User-Agent": PRODUCER})
    try:
        with _OPENER.open(request, timeout=TIMEOUT_S) as response:
            return _read_body(response).decode(errors="replace")
    except urllib.error.HTTPError as error:
        with error:
            raise ScrapeError(f"it responded with HTTP status {error.code}") from None
    except (OSError, http.client.HTTPException) as error:
        raise ScrapeError(str(getattr(error, "reason", error)) or type(error).__name__) from None


def _read_body(response: http.client.HTTPResponse) -> bytes:
    body = bytearray()
    deadline_s = time.monotonic() + BODY_TIMEOUT_S
    while chunk := response.read1(2**16):
        body += chunk
        if len(body) > MAX_BYTES:
            raise ScrapeError(f"its response is longer than {MAX_BYTES / 2**20:g} MiB")
        if time.monotonic() > deadline_s:
            raise ScrapeError(f"its response took longer than {BODY_TIMEOUT_S:g} s")
    # A connection that breaks ends `read1` like the end of the page does; `length` is what was still to come.
    if response.length or not body.endswith(b"\n"):  # the text format ends every line
        raise ScrapeError("its response was cut off" if body else "its response was empty")
    return bytes(body)


def parse_page(text: str, uuids: Collection[str]) -> dict[str, Values]:
    """Return the profiling metrics, possibly none, of each of the GPUs that the page lists.

    Series of a MIG instance or of a single NVLink are not the GPU's and are left out. Jobs or pods that share a GPU
    have a series each, with equal values. Raises ValueError if the text is not an exporter's page.
    """
    lines = [line for line in text.split("\n") if line.startswith("DCGM_FI_")]
    if not lines:
        raise ValueError("it exports no DCGM metric: is this the /metrics page of a dcgm-exporter?")
    # GPUs without any profiling metric are in it too: "not listed" and "no such metric" are different reports.
    values: dict[str, dict[str, float]] = {uuid: {} for uuid in uuids if any(f'"{uuid}"' in line for line in lines)}
    # Only the lines that are needed: a malformed line of another metric would fail the whole page.
    profiling = "\n".join(line for line in lines if line.startswith("DCGM_FI_PROF_"))
    try:
        samples = [sample for family in text_string_to_metric_families(profiling) for sample in family.samples]
    except (ValueError, IndexError) as error:
        raise ValueError(f"it is not Prometheus's text format ({str(error)[:200]})") from None
    for sample in samples:
        labels = sample.labels
        gpu = values.get(labels.get("UUID") or labels.get("uuid") or "")  # lower case: --use-old-namespace
        if gpu is None or labels.get("GPU_I_ID") or labels.get("nvlink"):
            continue
        value = float(sample.value)
        # NaN equals nothing, not even itself.
        gpu[sample.name] = value if gpu.get(sample.name, value) == value else _INVALID
    return dict(values)


def to_columns(exported: Values) -> tuple[dict[str, float], dict[str, Null]]:
    """Return the columns of samples_gpm in their units, and why the others are null."""
    columns: dict[str, float] = {}
    nulls: dict[str, Null] = {}
    for metric in METRICS:
        value = next((exported[name] for name in metric.names if name in exported), None)
        if value is None:
            nulls[metric.column] = Null.NOT_EXPORTED
        elif not 0 <= value < metric.limit:
            nulls[metric.column] = Null.ERROR
        else:
            columns[metric.column] = value * metric.factor
    return columns, nulls


@dataclass
class _Current:
    """The values that a GPU had at the last scrape."""

    values: Values
    first_ns: int  # middle of the scrape that first gave them
    last_ns: int  # start of the last scrape that gave them
    previous_ns: int | None  # start of the last scrape that gave other values; None: they may be of any age

    def repeated_by(self, values: Values) -> bool:
        """Return whether nothing that both hold differs; a metric that disappears renews nothing."""
        common = self.values.keys() & values.keys()
        return bool(common) and all(self.values[name] == values[name] for name in common)


class DcgmMonitor:
    """Scrapes the exporter in a thread, every `interval_s`, for the GPUs that lack GPM, whose windows are exact.

    `append(table, row)` takes rows of samples_gpm; `report(kind, detail, gpu_uuid)` is called with `dcgm` once per
    cause. After a failed scrape the interval grows, to the end of the run.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        devices: Sequence[DeviceState],
        append: Callable[[str, dict[str, Any]], None],
        report: Callable[[str, str, str | None], None],
        interval_s: float,
    ) -> None:
        self.source = f"dcgm:{endpoint.name}"
        self._endpoint = endpoint
        self._devices = devices
        self._append = append
        self._report = report
        self._interval_s = interval_s
        self._current: dict[str, _Current] = {}  # by UUID
        self._reported: set[tuple[str, str | None]] = set()
        self._scrapes = 0
        self._failed = 0
        self._error: str | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dcgm", daemon=True)
        self._metrics: set[str] = set()
        self._rows: Counter[str] = Counter()  # by UUID

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end. One that waits for the exporter is left behind: it writes no more rows."""
        self._stopping.set()
        self._thread.join(_JOIN_S)

    def report(self) -> DcgmReport:
        """Return the record for telemetry.json."""
        return DcgmReport(
            endpoint=self._endpoint.url,
            source=self.source,
            interval_s=self._interval_s,
            scrapes=self._scrapes,
            failed=self._failed,
            error=self._error,
            metrics=sorted(self._metrics.copy()),
            rows=dict(self._rows),
        )

    def scrape_once(self) -> bool:
        """Scrape for the GPUs that lack GPM; return False if that failed. Never raises."""
        # Asked at every scrape: that a card lacks GPM is known only after its first reads.
        devices = [device for device in self._devices if not device.lost and WINDOW in device.readers[GPM.name].absent]
        if not devices:
            return True
        unix_ns, start_ns = time.time_ns(), time.monotonic_ns()
        error: str | None = None
        pages: dict[str, Values] = {}
        try:
            pages = parse_page(scrape(self._endpoint), {device.uuid for device in devices})
        except (ScrapeError, ValueError) as problem:
            error = str(problem)
        except Exception as problem:  # our own bug costs this scrape and no more
            error = f"internal error: {problem!r}"
        duration_ns = time.monotonic_ns() - start_ns
        if self._stopping.is_set():  # the tables may be closed already
            return True
        head: dict[str, Any] = {
            "source": self.source,
            "tick_seq": FIRST_SEQ + self._scrapes + self._failed,
            "t_mono_ns": start_ns + duration_ns // 2,
            "t_unix_ns": unix_ns + duration_ns // 2,
            "read_us": duration_ns / 1000,
        }
        self._error = error
        if error is None:
            self._scrapes += 1
            for device in devices:
                self._handle_values(device, pages.get(device.uuid), start_ns, head)
        else:
            self._failed += 1
            log(f"dcgm: {error}")
            self._report_once("scrape", f"{self._endpoint.url}: {error}; its columns are null until it responds")
            for device in devices:
                self._write_null(device, Null.NO_ANSWER, head)
        return error is None

    def _handle_values(self, device: DeviceState, values: Values | None, start_ns: int, head: dict[str, Any]) -> None:
        """Write a row if the values are new, or if there is a reason for their absence.

        `head` holds the columns that all rows of the scrape share.
        """
        if not values:
            self._current.pop(device.uuid, None)
            lack = "does not list this GPU" if values is None else "exports no profiling metric (DCGM_FI_PROF_*) of it"
            self._report_once("lack", f"{self._endpoint.url} {lack}", device.uuid)
            self._write_null(device, Null.NOT_EXPORTED, head)
            return
        self._metrics |= values.keys()
        current, now_ns = self._current.get(device.uuid), head["t_mono_ns"]
        # The page has not been renewed since the last scrape, e.g. scraped every 5 s and renewed every 30 s.
        if current is not None and current.repeated_by(values):
            current.last_ns = start_ns
            age_s = (now_ns - current.first_ns) / 1e9
            if age_s > STALE_S:
                self._report_once("stale", f"{self._endpoint.url} has renewed nothing for {age_s:.0f} s", device.uuid)
                self._write_null(device, Null.STALE, head)
            return
        previous_ns = None if current is None else current.last_ns
        self._current[device.uuid] = _Current(values, now_ns, start_ns, previous_ns)
        if current is None or current.previous_ns is None:
            return  # values older than the first scrape, and the first after them, which may reach as far back
        # From before the last values came until now is at least one interval. The mean reaches at most one more back:
        # exporters up to 3.3 serve a copy, up to one interval old, of what DCGM averaged over one.
        window_ms = 2 * (now_ns - current.previous_ns) / 1e6
        columns, nulls = to_columns(values)
        self._rows[device.uuid] += 1
        row = {**head, "gpu_uuid": device.uuid, WINDOW: window_ms, **columns, "nulls": nulls_column(nulls)}
        self._append(GPM.table, row)

    def _write_null(self, device: DeviceState, reason: Null, head: dict[str, Any]) -> None:
        nulls = nulls_column(dict.fromkeys((WINDOW, *(metric.column for metric in METRICS)), reason))
        self._append(GPM.table, {**head, "gpu_uuid": device.uuid, "nulls": nulls})

    def _report_once(self, cause: str, sentence: str, gpu_uuid: str | None = None) -> None:
        if (cause, gpu_uuid) not in self._reported:
            self._reported.add((cause, gpu_uuid))
            self._report("dcgm", sentence, gpu_uuid)

    def _run(self) -> None:
        wait_s = self._interval_s
        while not self._stopping.wait(wait_s):
            # Doubled after each failure, up to a minute, and back to the interval after a success.
            wait_s = self._interval_s if self.scrape_once() else max(self._interval_s, min(2 * wait_s, MAX_BACKOFF_S))
