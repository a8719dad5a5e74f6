"""The optional dcgm-exporter: what is read from its page, how old it may be, and what its failures must not affect.

Every page is made up in the exporter's documented format and served by a real HTTP server on loopback.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest
from hypothesis import given
from hypothesis import settings as at_most
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from analysis.ingest import parts
from inpaint_bench.core.config.bench import config_hash
from inpaint_bench.core.config.validation import Endpoint
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import read_json
from inpaint_bench.core.schema import Null
from inpaint_bench.telemetry.devices import DeviceState, open_devices
from inpaint_bench.telemetry.sources import dcgm
from inpaint_bench.telemetry.sources.dcgm import METRICS, DcgmMonitor, parse_page, to_columns
from launchers.points.compose import composer
from tests.telemetry.support import FakeNvml, rows, start, uuid, wait_until

PAGE = (Path(__file__).parent / "pages" / "dcgm-exporter.txt").read_text()
LABELS = 'gpu="0",UUID="{}",device="nvidia0",modelName="NVIDIA A40",Hostname="gpua001"'
VALUES = [metric.column for metric in METRICS]


def page(name: str, **metrics: float) -> str:
    """Return a page with these profiling metrics of one GPU, and a clock."""
    labels = LABELS.format(name)
    lines = [f"DCGM_FI_PROF_{metric}{{{labels}}} {value:f}" for metric, value in metrics.items()]
    return "\n".join([f"DCGM_FI_DEV_SM_CLOCK{{{labels}}} 1740", *lines, ""])


class Exporter:
    """An HTTP server with a programmable response, which can be stopped and restarted on its port."""

    def __init__(self) -> None:
        self.text = ""
        self.status = 200
        self.headers: dict[str, str] = {"Content-Type": "text/plain; charset=utf-8"}
        self.requests: list[str] = []
        self.send: Callable[[BaseHTTPRequestHandler], None] | None = None  # in place of the text
        self._port = 0
        self.start()

    def start(self) -> None:
        exporter = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                exporter.requests.append(self.path)
                if exporter.send:
                    exporter.send(self)
                    return
                body = exporter.text.encode()
                self.send_response(exporter.status)
                for name, value in {"Content-Length": str(len(body)), **exporter.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def url(self) -> str:
        return f"http://{self.name}/metrics"


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    server = Exporter()
    yield server
    server.stop()


class Rig:
    """A monitor of GPUs without GPM, and what it wrote and reported."""

    def __init__(
        self, exporter: Exporter, num_gpus: int = 1, interval_s: float = 0.05, gpm: bool = False, url: str | None = None
    ) -> None:
        nvml = FakeNvml(num_gpus)
        for fails in nvml.fail.values():
            fails["gpm"] = 0 if gpm else 3
        self.exporter = exporter
        self.devices: list[DeviceState] = open_devices(nvml, nvml.gpus)
        for device in self.devices:
            for _ in range(4):
                device.readers["gpm"].read(nvml, device.handle)
        self.rows: list[dict[str, Any]] = []
        self.reported: list[tuple[str, str, str | None]] = []
        self.monitor = DcgmMonitor(
            Endpoint.parse(url or exporter.url),
            self.devices,
            lambda table, row: self.rows.append({"table": table, **row}),
            lambda kind, detail, gpu_uuid: self.reported.append((kind, detail, gpu_uuid)),
            interval_s,
        )

    def scrape(self, *texts: str) -> list[bool]:
        """Scrape each of the pages once."""
        results = []
        for text in texts:
            self.exporter.text = text
            results.append(self.monitor.scrape_once())
        return results


class TestPage:
    def test_ratios_become_percent_and_bytes_become_mebibytes_of_the_gpu_with_our_uuid(self) -> None:
        exported = parse_page(PAGE, [uuid(0)])[uuid(0)]
        values, nulls = to_columns(exported)
        assert values == {
            "sm_active_pct": 87.5,
            "tensor_active_pct": 43.75,
            "dram_active_pct": 62.5,
            "pcie_tx_mib_s": 50.0,  # a rate, though the page calls it a counter
            "pcie_rx_mib_s": 100.0,
        }
        assert nulls == dict.fromkeys(("sm_occupancy_pct", "nvlink_tx_mib_s", "nvlink_rx_mib_s"), Null.NOT_EXPORTED)
        assert set(exported) - {name for metric in METRICS for name in metric.names} == {
            "DCGM_FI_PROF_GR_ENGINE_ACTIVE"
        }

    def test_mig_instance_is_not_its_gpu_and_an_unlisted_gpu_is_not_found(self) -> None:
        assert parse_page(PAGE, [uuid(2), uuid(3)]) == {uuid(2): {}}

    def test_series_of_a_single_nvlink_is_ignored(self) -> None:
        total = page(uuid(0), NVLINK_TX_BYTES=3 * 2**20)
        link = f'DCGM_FI_PROF_NVLINK_TX_BYTES{{{LABELS.format(uuid(0))},nvlink="2"}} {2**20}\n'
        values, _ = to_columns(parse_page(total + link, [uuid(0)])[uuid(0)])
        assert values == {"nvlink_tx_mib_s": 3.0}

    def test_old_and_new_names_of_a_field_are_equivalent(self) -> None:
        old = page(uuid(0), SM_ACTIVE=0.25, SM_OCCUPANCY=0.5, PIPE_TENSOR_ACTIVE=0.75, DRAM_ACTIVE=1.0)
        new = page(uuid(0), SM_UTIL_RATIO=0.25, SM_OCCUPANCY_RATIO=0.5, TENSOR_UTIL_RATIO=0.75, DRAM_UTIL_RATIO=1.0)
        by_old, by_new = (to_columns(parse_page(text, [uuid(0)])[uuid(0)]) for text in (old, new))
        assert by_old == by_new
        assert by_new[0] == {
            "sm_active_pct": 25.0,
            "sm_occupancy_pct": 50.0,
            "tensor_active_pct": 75.0,
            "dram_active_pct": 100.0,
        }

    def test_lower_case_uuid_label_of_the_old_namespace_is_accepted(self) -> None:
        text = page(uuid(0), SM_ACTIVE=0.25).replace("UUID=", "uuid=")
        assert parse_page(text, [uuid(0)]) == {uuid(0): {"DCGM_FI_PROF_SM_ACTIVE": 0.25}}

    @pytest.mark.parametrize("value", ["NaN", "-0.1", "+Inf", "41.2", "140737488355328.0", "9223372036854775794"])
    def test_value_that_is_no_ratio_is_null(self, value: str) -> None:
        """Blanks of DCGM, and percent where a ratio belongs."""
        text = page(uuid(0), SM_ACTIVE=0.5, DRAM_ACTIVE=0.25).replace("0.250000", value)
        values, nulls = to_columns(parse_page(text, [uuid(0)])[uuid(0)])
        assert (values, nulls["dram_active_pct"]) == ({"sm_active_pct": 50.0}, Null.ERROR)

    def test_series_of_jobs_on_one_gpu_count_only_if_they_agree(self) -> None:
        first = page(uuid(0), SM_ACTIVE=0.5, DRAM_ACTIVE=0.5)
        same = first.replace('gpu="0"', 'gpu="0",hpc_job="1"')
        other = page(uuid(0), SM_ACTIVE=0.5, DRAM_ACTIVE=0.25)
        agreed = parse_page(first + same, [uuid(0)])[uuid(0)]
        assert to_columns(agreed)[0] == {"sm_active_pct": 50.0, "dram_active_pct": 50.0}
        values, nulls = to_columns(parse_page(first + other, [uuid(0)])[uuid(0)])
        assert (values, nulls["dram_active_pct"]) == ({"sm_active_pct": 50.0}, Null.ERROR)

    @at_most(max_examples=150, deadline=None)
    @given(st.text(alphabet='{}",=\\# \tUID-0aé\r\n\x00', max_size=60))
    def test_any_text_after_a_metric_name_is_parsed_or_refused_with_value_error(self, noise: str) -> None:
        """The thread reports a ValueError as the scrape's failure."""
        try:
            parse_page(f'DCGM_FI_PROF_SM_ACTIVE{{UUID="{uuid(0)}",{noise}\n', [uuid(0)])
        except ValueError as error:
            assert "text format" in str(error)  # noqa: PT017


class TestFreshness:
    def test_row_is_written_for_values_that_replaced_others_with_a_bound_on_their_window(
        self, exporter: Exporter
    ) -> None:
        """The first values may be of any age, and the first to replace them may reach as far back."""
        rig = Rig(exporter)
        first, second, third = (page(uuid(0), SM_ACTIVE=share) for share in (0.1, 0.2, 0.3))
        rig.scrape(first)
        before_ns = time.monotonic_ns()
        rig.scrape(first)
        scraped_ns = time.monotonic_ns()
        rig.scrape(second, second)
        assert rig.rows == []
        time.sleep(0.1)
        rig.scrape(third)
        after_ns = time.monotonic_ns()
        (row,) = rig.rows
        assert row["table"] == "samples_gpm"
        assert row["source"] == f"dcgm:{exporter.name}"
        assert row["sm_active_pct"] == pytest.approx(30)
        assert "dram_active_pct=not_exported" in row["nulls"]
        assert "sm_active_pct" not in row["nulls"]
        assert scraped_ns < row["t_mono_ns"] < after_ns
        # Twice the longest interval that the exporter can have: from the last scrape of the first values to now.
        assert 200 < 2 * (row["t_mono_ns"] - scraped_ns) / 1e6 < row["window_ms"]
        assert row["window_ms"] < 2 * (row["t_mono_ns"] - before_ns) / 1e6

    def test_repeated_values_give_no_row(self, exporter: Exporter) -> None:
        rig = Rig(exporter)
        rig.scrape(*(page(uuid(0), SM_ACTIVE=share) for share in (0.1, 0.2, 0.3, 0.3, 0.3, 0.4)))
        assert [row["sm_active_pct"] for row in rig.rows] == pytest.approx([30, 40])
        assert rig.monitor.report().rows == {uuid(0): 2}

    def test_disappearing_metric_does_not_renew_the_others(self, exporter: Exporter) -> None:
        rig = Rig(exporter)
        rig.scrape(*(page(uuid(0), SM_ACTIVE=share, DRAM_ACTIVE=share) for share in (0.1, 0.2)))
        rig.scrape(page(uuid(0), SM_ACTIVE=0.2))
        assert rig.rows == []

    def test_contradicting_series_do_not_renew_the_others(self, exporter: Exporter) -> None:
        rig = Rig(exporter)
        for share in (0.1, 0.2, 0.2):
            rig.scrape(page(uuid(0), SM_ACTIVE=share, DRAM_ACTIVE=0.5) + page(uuid(0), DRAM_ACTIVE=share))
        assert rig.rows == []

    def test_values_that_never_change_are_null_as_stale_and_reported_once(
        self, exporter: Exporter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(dcgm, "STALE_S", 0.05)
        rig = Rig(exporter)
        rig.scrape(*(page(uuid(0), SM_ACTIVE=share) for share in (0.1, 0.2)))
        time.sleep(0.06)
        assert rig.scrape(*[page(uuid(0), SM_ACTIVE=0.2)] * 3) == [True] * 3
        assert len(rig.rows) == 3
        assert all(row["nulls"].count("=stale") == 9 and "sm_active_pct" not in row for row in rig.rows)
        ((kind, sentence, about),) = rig.reported
        assert (kind, about) == ("dcgm", uuid(0))
        assert "has renewed nothing" in sentence
        rig.scrape(page(uuid(0), SM_ACTIVE=0.3))
        assert rig.rows[-1]["sm_active_pct"] == pytest.approx(30)


class TestTrouble:
    def test_unlisted_gpu_and_gpu_without_profiling_metrics_have_rows_with_the_reason(self, exporter: Exporter) -> None:
        rig = Rig(exporter, num_gpus=2)
        assert rig.scrape(*[page(uuid(0))] * 3) == [True] * 3
        assert {(row["gpu_uuid"], row["nulls"].count("=not_exported")) for row in rig.rows} == {
            (uuid(0), 9),
            (uuid(1), 9),
        }
        assert rig.reported == [
            ("dcgm", f"{exporter.url} exports no profiling metric (DCGM_FI_PROF_*) of it", uuid(0)),
            ("dcgm", f"{exporter.url} does not list this GPU", uuid(1)),
        ]

    def _refused(self, exporter: Exporter) -> str:
        """Return the error after two failed scrapes, of which one was reported, with rows of nulls."""
        rig = Rig(exporter)
        start_s = time.monotonic()
        assert [rig.monitor.scrape_once(), rig.monitor.scrape_once()] == [False, False]
        assert time.monotonic() - start_s < 8
        assert [row["nulls"].count("=no_answer") for row in rig.rows] == [9, 9]
        report = rig.monitor.report()
        assert (report.scrapes, report.failed) == (0, 2)
        ((kind, sentence, about),) = rig.reported
        assert (kind, about) == ("dcgm", None)
        assert sentence.startswith(f"{exporter.url}: {report.error}; ")
        return str(report.error)

    def test_web_page_is_not_taken_for_metrics(self, exporter: Exporter) -> None:
        exporter.headers = {"Content-Type": "text/html"}
        exporter.text = "<html>\n<head><title>GPU Exporter</title></head>\n</html>\n"
        assert "exports no DCGM metric" in self._refused(exporter)

    def test_malformed_line_is_reported(self, exporter: Exporter) -> None:
        exporter.text = f'DCGM_FI_PROF_SM_ACTIVE{{UUID="{uuid(0)}"}} many\n'
        assert "is not Prometheus's text format" in self._refused(exporter)

    def test_endless_response_is_abandoned_at_the_size_limit(self, exporter: Exporter) -> None:
        sent = []

        def endless(request: BaseHTTPRequestHandler) -> None:
            request.send_response(200)
            request.end_headers()
            while len(sent) < 1000:
                sent.append(request.wfile.write(b"# " + b"x" * 2**16 + b"\n"))

        exporter.send = endless
        assert self._refused(exporter) == "its response is longer than 4 MiB"
        assert sum(sent) < 64 * 2**20

    def test_dripping_response_is_abandoned(self, exporter: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dcgm, "BODY_TIMEOUT_S", 0.2)

        def drip(request: BaseHTTPRequestHandler) -> None:
            request.send_response(200)
            request.end_headers()
            for _ in range(100):
                request.wfile.write(b"#\n")
                time.sleep(0.05)

        exporter.send = drip
        assert "took longer than 0.2 s" in self._refused(exporter)

    def test_hanging_exporter_is_abandoned(self, exporter: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dcgm, "TIMEOUT_S", 0.2)
        exporter.send = lambda request: time.sleep(1)
        assert "timed out" in self._refused(exporter)

    @pytest.mark.parametrize(("end", "missing"), [(-4, 0), (None, 100)])
    def test_truncated_response_gives_no_value(self, exporter: Exporter, end: int | None, missing: int) -> None:
        """Within a line, whose number may have lost digits, or between lines, by the Content-Length."""
        exporter.text = page(uuid(0), SM_ACTIVE=0.5)[:end]
        exporter.headers = {"Content-Length": str(len(exporter.text) + missing)}
        assert self._refused(exporter) == "its response was cut off"

    def test_empty_page_of_a_reloading_exporter_is_reported(self, exporter: Exporter) -> None:
        assert self._refused(exporter) == "its response was empty"

    def test_redirect_is_not_followed(self, exporter: Exporter) -> None:
        other = Exporter()
        other.text = page(uuid(0), SM_ACTIVE=0.5)
        exporter.status, exporter.headers = 302, {"Location": other.url}
        assert self._refused(exporter) == f"it redirects to {other.url}, which is not followed"
        other.stop()
        assert other.requests == []

    def test_http_error_is_reported_with_its_status(self, exporter: Exporter) -> None:
        exporter.status = 503
        assert self._refused(exporter) == "it responded with HTTP status 503"

    def test_server_that_does_not_speak_http_is_reported(self, exporter: Exporter) -> None:
        exporter.send = lambda request: request.wfile.write(b"SSH-2.0-OpenSSH_9.2\r\n")
        assert "SSH-2.0" in self._refused(exporter)

    def test_untrusted_tls_is_reported(self, exporter: Exporter) -> None:
        rig = Rig(exporter, url=exporter.url.replace("http:", "https:"))
        assert rig.scrape(PAGE) == [False]
        assert "SSL" in str(rig.monitor.report().error)

    def test_proxy_of_the_environment_is_not_used(self, exporter: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
        """Compute nodes of Grace reach the internet through one, which knows nothing of their loopback."""
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        assert Rig(exporter).scrape(PAGE) == [True]

    def test_exporter_outage_costs_only_its_own_time(self, exporter: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dcgm, "MAX_BACKOFF_S", 0.1)
        rig = Rig(exporter, interval_s=0.03)
        values = iter(range(1, 10**6))

        def fresh(request: BaseHTTPRequestHandler) -> None:
            request.send_response(200)
            request.end_headers()
            request.wfile.write(page(uuid(0), SM_ACTIVE=next(values) / 10**6).encode())

        exporter.send = fresh
        rig.monitor.start()
        wait_until(lambda: len(rig.rows) > 2)
        exporter.stop()
        wait_until(lambda: "no_answer" in rig.rows[-1]["nulls"] and rig.monitor.report().failed > 2)
        exporter.start()
        wait_until(lambda: "no_answer" not in rig.rows[-1]["nulls"])
        rig.monitor.stop()
        assert len(rig.reported) == 1
        assert rig.monitor.report().error is None
        num_rows = len(rig.rows)
        time.sleep(0.15)
        assert len(rig.rows) == num_rows
        assert len({row["tick_seq"] for row in rig.rows}) == num_rows

    def test_dead_exporter_is_scraped_at_growing_intervals(self, exporter: Exporter) -> None:
        rig = Rig(exporter, interval_s=0.05)
        exporter.stop()
        start_s = time.monotonic()
        rig.monitor.start()
        wait_until(lambda: rig.monitor.report().failed == 4)  # after 0.05, 0.15, 0.35, 0.75 s
        assert time.monotonic() - start_s > 0.7
        rig.monitor.stop()
        exporter.start()


def _without_hydra(config: DictConfig) -> DictConfig:
    """Return the configuration as a job has it."""
    return OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])


def test_lost_gpu_has_no_further_rows(exporter: Exporter) -> None:
    rig = Rig(exporter, num_gpus=2)
    rig.devices[0].lost = True
    rig.scrape(page("GPU-of-another-job", SM_ACTIVE=0.5))
    assert [row["gpu_uuid"] for row in rig.rows] == [uuid(1)]


def test_exporter_is_not_scraped_for_a_gpu_with_gpm(exporter: Exporter) -> None:
    rig = Rig(exporter, gpm=True)
    assert rig.scrape(page(uuid(0), SM_ACTIVE=0.5)) == [True]
    assert (exporter.requests, rig.rows) == ([], [])


class TestAddress:
    @pytest.mark.parametrize(
        ("url", "phrase"),
        [
            ("file:///etc/passwd", "must begin with http://"),
            ("ftp://node:9400/metrics", "must begin with http://"),
            ("localhost:9400", "must begin with http://"),
            ("http:///metrics", "has no host"),
            ("http://node:99999/metrics", "is not a URL"),
            ("http://me:secret@node/metrics", "user, password"),
            ("http://node/metrics?token=1", "user, password, query"),
            ("http://node/a b", "without spaces"),
            ("http://nöde/metrics", "printable ASCII"),
        ],
    )
    def test_impossible_address_is_refused_with_the_reason(self, url: str, phrase: str) -> None:
        with pytest.raises(ValueError, match=phrase):
            Endpoint.parse(url)

    def test_wrong_address_is_refused_before_anything_is_submitted(self) -> None:
        lines = {
            "telemetry.dcgm_url": ["gpu=a40", "telemetry.dcgm_url=ftp://node"],
            "sites.delta.gpus.a100.dcgm_url": ["gpu=a100", "site=delta", "sites.delta.gpus.a100.dcgm_url=ftp://node"],
        }
        with composer() as compose:
            for key, line in lines.items():
                with pytest.raises(UserError, match="must begin with http://") as refused:
                    compose(0, line)
                assert str(refused.value).startswith(f"{key}=ftp://node: ")

    def test_default_path_is_metrics_and_ipv6_keeps_its_brackets(self) -> None:
        plain, six = Endpoint.parse("http://node:9400"), Endpoint.parse("https://[::1]/")
        assert (plain.name, plain.url) == ("node:9400", "http://node:9400/metrics")
        assert (six.name, six.url) == ("[::1]:443", "https://[::1]:443/metrics")

    def test_exporter_of_the_site_applies_to_its_gpu_and_an_override_takes_precedence(self) -> None:
        site = "sites.delta.gpus.a100.dcgm_url=http://localhost:9400"
        lines = {
            "site": ["gpu=a100", "site=delta", site],
            "own": ["gpu=a100", "site=delta", site, "telemetry.dcgm_url=http://other:9400"],
            "other_gpu": ["gpu=a40", "site=delta", site],
            "replay": ["gpu=a100", "site=delta", site, "telemetry=replay"],
        }
        with composer() as compose:
            points = {name: compose(0, line) for name, line in lines.items()}
        carried = {name: point.config.telemetry.dcgm_url for name, point in points.items()}
        assert carried == {
            "site": "http://localhost:9400",
            "own": "http://other:9400",
            "other_gpu": None,
            "replay": None,
        }
        assert carried == {name: point.bench.telemetry.dcgm_url for name, point in points.items()}

    def test_exporter_address_does_not_change_the_config_hash(self) -> None:
        with composer() as compose:
            first, second = (
                _without_hydra(compose(0, ["gpu=a100", f"telemetry.dcgm_url={url}"]).config)
                for url in ("http://a:9400", "null")
            )
        assert config_hash(first) == config_hash(second)


class TestSidecar:
    def _serve_changing_values(self, exporter: Exporter, name: str) -> None:
        values = iter(range(1, 10**6))

        def fresh(request: BaseHTTPRequestHandler) -> None:
            request.send_response(200)
            request.end_headers()
            request.wfile.write(page(name, SM_ACTIVE=next(values) / 10**6, DRAM_ACTIVE=0.5).encode())

        exporter.send = fresh

    @pytest.mark.subprocess
    def test_exporter_rows_are_beside_the_gpm_streams_rows_and_cannot_be_confused_with_them(
        self, exporter: Exporter, tmp_path: Path
    ) -> None:
        """Rows are identified by GPU and tick number, which must not repeat within a table."""
        self._serve_changing_values(exporter, "REPLAY-a40-synthetic")
        sidecar = start(tmp_path, capture="a40-synthetic", slow_hz=5.0, dcgm_url=exporter.url, dcgm_every_s=0.1)
        time.sleep(1.1)
        report = sidecar.stop()
        assert report.status == "complete"
        table = rows(tmp_path, "samples_gpm").cast({"source": pl.String, "gpu_uuid": pl.String})
        by_source = dict(table.group_by("source").len().iter_rows())
        assert set(by_source) == {"replay:a40-synthetic", f"dcgm:{exporter.name}"}
        exported = table.filter(pl.col("source").str.starts_with("dcgm:"))
        assert len(exported) >= 3
        assert exported.select(pl.struct("gpu_uuid", "tick_seq").n_unique()).item() == len(exported)
        assert table.select(pl.struct("gpu_uuid", "tick_seq").n_unique()).item() == len(table)
        assert exported["dram_active_pct"].to_list() == [50.0] * len(exported)
        assert exported["window_ms"].min() > 200
        assert set(table.filter(~pl.col("source").str.starts_with("dcgm:"))["sm_active_pct"]) == {None}
        dcgm_report = report.dcgm
        assert dcgm_report is not None
        assert msgspec.to_builtins(dcgm_report) == read_json(tmp_path / "telemetry.json")["dcgm"]
        assert (dcgm_report.endpoint, dcgm_report.source) == (exporter.url, f"dcgm:{exporter.name}")
        assert (dcgm_report.failed, dcgm_report.error) == (0, None)
        assert dcgm_report.scrapes >= len(exported) + 2
        assert dcgm_report.metrics == ["DCGM_FI_PROF_DRAM_ACTIVE", "DCGM_FI_PROF_SM_ACTIVE"]
        assert dcgm_report.rows == {"REPLAY-a40-synthetic": len(exported)}
        files, skips = parts.open_table(tmp_path / "samples_gpm", "samples_gpm", "r-test")
        merged, _ = parts.read_table("samples_gpm", files, "r-test")
        assert (merged.num_rows, skips) == (len(table), [])

    @pytest.mark.subprocess
    def test_exporter_is_not_scraped_if_gpm_works(self, exporter: Exporter, tmp_path: Path) -> None:
        self._serve_changing_values(exporter, "REPLAY-h200-synthetic")
        sidecar = start(tmp_path, slow_hz=5.0, dcgm_url=exporter.url, dcgm_every_s=0.1)
        time.sleep(0.8)
        dcgm_report = sidecar.stop().dcgm
        assert dcgm_report is not None
        assert exporter.requests == []
        assert (dcgm_report.scrapes, dcgm_report.rows) == (0, {})
        assert set(rows(tmp_path, "samples_gpm")["source"]) == {"replay:h200-synthetic"}

    @pytest.mark.subprocess
    def test_hanging_exporter_disturbs_neither_the_sampling_nor_the_end(
        self, exporter: Exporter, tmp_path: Path
    ) -> None:
        exporter.send = lambda request: time.sleep(5)
        sidecar = start(tmp_path, capture="a40-synthetic", slow_hz=5.0, dcgm_url=exporter.url, dcgm_every_s=0.2)
        wait_until(lambda: bool(exporter.requests))
        time.sleep(0.5)
        stop_s = time.monotonic()
        report = sidecar.stop()
        assert time.monotonic() - stop_s < 4.5, "it waited for the answer"
        assert report.status == "complete"
        gaps_ms = rows(tmp_path, "samples_fast")["t_mono_ns"].diff().drop_nulls() / 1e6
        assert gaps_ms.median() == pytest.approx(100, abs=3)
        assert gaps_ms.max() < 4500

    @pytest.mark.subprocess
    def test_dead_exporter_is_one_event_and_the_run_is_complete(self, exporter: Exporter, tmp_path: Path) -> None:
        exporter.stop()
        sidecar = start(tmp_path, capture="a40-synthetic", slow_hz=5.0, dcgm_url=exporter.url, dcgm_every_s=0.1)
        time.sleep(1.0)
        report = sidecar.stop()
        exporter.start()
        assert report.status == "complete"
        events = rows(tmp_path, "events").filter(pl.col("kind") == "dcgm")
        (sentence,) = events["detail"]
        assert "Connection refused" in sentence
        assert report.problems == [f"dcgm: {sentence}"]
