"""GPU counters from a site's dcgm-exporter, for cards without GPM (A40, A100): a thread that asks its page.

The page says no times. The exporter renews its values by an interval of its own, 30 s unless the site chose
another, and a value is a mean over at most one such interval. So a row is written only for values seen to
replace others, and its `window_ms` says how far back they may reach: a bound, not the length of a mean as for GPM.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isnan
from typing import TYPE_CHECKING, Any, Final

from inpaint_bench.core.schema import Null
from inpaint_bench.core.validation import Endpoint
from inpaint_bench.telemetry.log import log
from inpaint_bench.telemetry.sampling.streams import GPM, WINDOW

from .dcgm_metrics import FIELD_IDS, METRICS, Series, read_page, to_columns
from .scrape import ScrapeError, scrape
from .thread import Helper

if TYPE_CHECKING:
    from inpaint_bench.telemetry.devices import Device

BACKOFF_MAX_S: Final = 60.0
STALE_S: Final = 90.0  # three of the exporter's usual intervals
FIRST_SEQ: Final = 2**31  # the GPM lane numbers its rows from 0, and (GPU, number) is a row's name in the table
_JOIN_S: Final = 0.2
_PROBLEM: Final = "dcgm"


@dataclass
class _Seen:
    """The values that a GPU had at the last scrape."""

    series: Series
    since_ns: int  # middle of the scrape that gave them first
    last_ns: int  # start of the last scrape that gave them
    before_ns: int | None  # start of the last scrape that still gave others; None: they may be of any age

    def repeated_by(self, series: Series) -> bool:
        """Whether nothing that both hold differs. An exporter that drops a metric has renewed nothing by that."""
        both = self.series.keys() & series.keys()
        return bool(both) and all(
            self.series[name] == series[name] or (isnan(self.series[name]) and isnan(series[name])) for name in both
        )


@dataclass(frozen=True)
class _Moment:
    """One scrape."""

    seq: int
    start_ns: int
    t_mono_ns: int  # its middle
    t_unix_ns: int
    read_us: float


class DcgmWatch(Helper):
    """`append(table, row)` takes rows of samples_gpm; `report(kind, detail, gpu_uuid)` hears `dcgm` once per cause.

    A GPU whose driver counts GPM is never asked for: GPM's windows are exact. An endpoint that does not answer
    is asked again at growing intervals, to the end of the run.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        devices: Sequence[Device],
        append: Callable[[str, dict[str, Any]], None],
        report: Callable[[str, str, str | None], None],
        every_s: float,
    ) -> None:
        super().__init__("dcgm", _JOIN_S)
        self.source = f"dcgm:{endpoint.name}"
        self._endpoint = endpoint
        self._devices = devices
        self._append = append
        self._report = report
        self._every_s = every_s
        self._seen: dict[str, _Seen] = {}
        self._told: set[tuple[str, str | None]] = set()
        self._done = 0
        self._failed = 0
        self._error: str | None = None
        self._metrics: set[str] = set()
        self._rows = {device.uuid: 0 for device in devices}

    def account(self) -> dict[str, Any]:
        """For telemetry.json.

        error: of the last scrape, null where it went well; metrics: what was given, with DCGM's number of each field
        that feeds a column; rows: those that hold values.
        """
        return {
            "endpoint": self._endpoint.url,
            "source": self.source,
            "every_s": self._every_s,
            "scrapes": self._done,
            "failed": self._failed,
            "error": self._error,
            "metrics": {name: FIELD_IDS.get(name) for name in sorted(self._metrics.copy())},
            "devices": [
                {
                    "uuid": device.uuid,
                    "polled": (polled := _lacks_gpm(device)),
                    "reason": None if polled else "gpm_preferred" if _probed(device) else "gpm_not_probed_yet",
                    "rows": self._rows[device.uuid],
                }
                for device in self._devices
            ],
        }

    def look(self) -> bool:
        """One scrape for the GPUs that lack GPM; False where it failed. Never raises."""
        devices = [device for device in self._devices if not device.lost and _lacks_gpm(device)]
        if not devices:
            return True
        unix_ns, start_ns = time.time_ns(), time.monotonic_ns()
        error, pages = self._ask(devices)
        took_ns = time.monotonic_ns() - start_ns
        half_ns, seq = took_ns // 2, FIRST_SEQ + self._done + self._failed
        moment = _Moment(seq, start_ns, start_ns + half_ns, unix_ns + half_ns, took_ns / 1000)
        if self._stopping.is_set():  # the tables may be closed already
            return True
        self._error = error
        if error is None:
            self._done += 1
            for device in devices:
                self._take(device, pages.get(device.uuid), moment)
        else:
            self._failed += 1
            log(f"dcgm: {error}")
            self._tell("scrape", f"{self._endpoint.url}: {error}; its columns are null until it answers")
            for device in devices:
                self._write_null(device, Null.NO_ANSWER, moment)
        return error is None

    def _ask(self, devices: Sequence[Device]) -> tuple[str | None, dict[str, Series]]:
        try:
            return None, read_page(scrape(self._endpoint), {device.uuid for device in devices})
        except (ScrapeError, ValueError) as error:
            return str(error), {}
        except Exception as error:  # a mistake of ours costs this scrape and no more
            return f"internal error: {error!r}", {}

    def _take(self, device: Device, series: Series | None, moment: _Moment) -> None:
        """A row where the values are new, or where there is a reason why there are none."""
        if not series:
            self._seen.pop(device.uuid, None)
            lack = "does not list this GPU" if series is None else "gives no profiling metric (DCGM_FI_PROF_*) of it"
            self._tell("lack", f"{self._endpoint.url} {lack}", device.uuid)
            self._write_null(device, Null.NOT_EXPORTED, moment)
            return
        self._metrics |= series.keys()
        seen = self._seen.get(device.uuid)
        if seen is not None and seen.repeated_by(series):
            seen.last_ns = moment.start_ns
            still_s = (moment.t_mono_ns - seen.since_ns) / 1e9
            if still_s > STALE_S:
                self._tell("stale", f"{self._endpoint.url} has renewed nothing for {still_s:.0f} s", device.uuid)
                self._write_null(device, Null.STALE, moment)
            return
        before_ns = None if seen is None else seen.last_ns
        self._seen[device.uuid] = _Seen(series, moment.t_mono_ns, moment.start_ns, before_ns)
        if seen is None or seen.before_ns is None:
            return  # values from before we looked, and the first after them, which may reach as far back
        # From before the last values came until now is one interval at least. The mean reaches at most one more
        # back: exporters up to 3.3 serve a copy, up to one interval old, of what DCGM averaged over one.
        window_ms = 2 * (moment.t_mono_ns - seen.before_ns) / 1e6
        values, nulls = to_columns(series)
        self._rows[device.uuid] += 1
        self._write(device, {WINDOW: window_ms, **values}, nulls, moment)

    def _write_null(self, device: Device, why: Null, moment: _Moment) -> None:
        self._write(device, {}, dict.fromkeys((WINDOW, *(metric.column for metric in METRICS)), why), moment)

    def _write(self, device: Device, values: dict[str, float], nulls: dict[str, Null], moment: _Moment) -> None:
        row: dict[str, Any] = {
            "gpu_uuid": device.uuid,
            "source": self.source,
            "tick_seq": moment.seq,
            "t_mono_ns": moment.t_mono_ns,
            "t_unix_ns": moment.t_unix_ns,
            "read_us": moment.read_us,
            "nulls": ";".join(f"{column}={why.value}" for column, why in sorted(nulls.items())) or None,
            **values,
        }
        self._append(GPM.table, row)

    def _tell(self, cause: str, sentence: str, gpu_uuid: str | None = None) -> None:
        if (cause, gpu_uuid) not in self._told:
            self._told.add((cause, gpu_uuid))
            self._report(_PROBLEM, sentence, gpu_uuid)

    def _run(self) -> None:
        wait_s = self._every_s
        while not self._stopping.wait(wait_s):
            wait_s = self._every_s if self.look() else max(self._every_s, min(2 * wait_s, BACKOFF_MAX_S))


def _lacks_gpm(device: Device) -> bool:
    return WINDOW in device.readers[GPM.name].absent


def _probed(device: Device) -> bool:
    return device.readers[GPM.name].probed
