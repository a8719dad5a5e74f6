"""The optional dcgm-exporter: what is taken from its page, how old it may be, and what its troubles may not do.

Every page here is made up in the exporter's documented format and served by a real HTTP server on loopback.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import polars as pl
import pytest
from hypothesis import given
from hypothesis import settings as at_most
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from analysis.ingest import parts
from inpaint_bench.core.config import config_hash
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.files import read_json
from inpaint_bench.core.schema import Null
from inpaint_bench.core.validation import Endpoint
from inpaint_bench.telemetry.devices import Device, open_devices
from inpaint_bench.telemetry.nvml.api import Nvml
from inpaint_bench.telemetry.sources import dcgm, scrape
from inpaint_bench.telemetry.sources.dcgm import DcgmWatch
from inpaint_bench.telemetry.sources.dcgm_metrics import METRICS, read_page, to_columns
from inpaint_bench.telemetry.spec import Spec
from launchers.points.compose import composer
from tests.telemetry.support import FakeGpus, rows, start, uuid

PAGE = (Path(__file__).parent / "pages" / "dcgm-exporter.txt").read_text()
LABELS = 'gpu="0",UUID="{}",device="nvidia0",modelName="NVIDIA A40",Hostname="gpua001"'
VALUES = [metric.column for metric in METRICS]


def page(name: str, **metrics: float) -> str:
    """A page with these profiling metrics of one GPU, and a clock."""
    labels = LABELS.format(name)
    lines = [f"DCGM_FI_PROF_{metric}{{{labels}}} {value:f}" for metric, value in metrics.items()]
    return "\n".join([f"DCGM_FI_DEV_SM_CLOCK{{{labels}}} 1740", *lines, ""])


class Exporter:
    """An HTTP server that answers as it is told, and can die and come back on its port."""

    def __init__(self) -> None:
        self.text = ""
        self.status = 200
        self.headers: dict[str, str] = {"Content-Type": "text/plain; charset=utf-8"}
        self.asked: list[str] = []
        self.send: Callable[[BaseHTTPRequestHandler], None] | None = None  # in place of the text
        self._port = 0
        self.live()

    def live(self) -> None:
        exporter = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                exporter.asked.append(self.path)
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

    def die(self) -> None:
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
    one = Exporter()
    yield one
    one.die()


class Rig:
    """A watch on GPUs without GPM, and what it wrote and reported."""

    def __init__(
        self, exporter: Exporter, num_gpus: int = 1, every_s: float = 0.05, gpm: bool = False, url: str | None = None
    ) -> None:
        gpus = FakeGpus(num_gpus)
        nvml = cast(Nvml, gpus)
        for fails in gpus.fail.values():
            fails["gpm"] = 0 if gpm else 3
        self.exporter = exporter
        self.devices: list[Device] = open_devices(nvml, gpus.known)
        for device in self.devices:
            for _ in range(4):
                device.readers["gpm"].read(nvml, device.handle)
        self.rows: list[dict[str, Any]] = []
        self.told: list[tuple[str, str, str | None]] = []
        self.watch = DcgmWatch(
            Endpoint.parse(url or exporter.url),
            self.devices,
            lambda table, row: self.rows.append({"table": table, **row}),
            lambda kind, detail, gpu_uuid: self.told.append((kind, detail, gpu_uuid)),
            every_s,
        )

    def see(self, *texts: str) -> list[bool]:
        """One scrape of each page."""
        done = []
        for text in texts:
            self.exporter.text = text
            done.append(self.watch.look())
        return done


class TestPage:
    def test_ratios_become_percent_and_bytes_mebibytes_of_the_gpu_with_our_uuid_whatever_its_index(self) -> None:
        found = read_page(PAGE, [uuid(0)])
        values, nulls = to_columns(found[uuid(0)])
        assert values == {
            "sm_active_pct": 87.5,
            "tensor_active_pct": 43.75,
            "dram_active_pct": 62.5,
            "pcie_tx_mib_s": 50.0,  # a rate, though the page calls it a counter
            "pcie_rx_mib_s": 100.0,
        }
        assert nulls == dict.fromkeys(("sm_occupancy_pct", "nvlink_tx_mib_s", "nvlink_rx_mib_s"), Null.NOT_EXPORTED)
        assert set(found[uuid(0)]) - {name for metric in METRICS for name in metric.names} == {
            "DCGM_FI_PROF_GR_ENGINE_ACTIVE"
        }

    def test_a_mig_instance_is_not_its_gpu_and_a_gpu_that_is_not_there_is_not_found(self) -> None:
        assert read_page(PAGE, [uuid(2), uuid(3)]) == {uuid(2): {}}

    def test_the_series_of_one_link_is_not_that_of_all(self) -> None:
        whole = page(uuid(0), NVLINK_TX_BYTES=3 * 2**20)
        link = f'DCGM_FI_PROF_NVLINK_TX_BYTES{{{LABELS.format(uuid(0))},nvlink="2"}} {2**20}\n'
        values, _ = to_columns(read_page(whole + link, [uuid(0)])[uuid(0)])
        assert values == {"nvlink_tx_mib_s": 3.0}

    def test_the_old_and_the_new_name_of_a_field_mean_the_same(self) -> None:
        old = page(uuid(0), SM_ACTIVE=0.25, SM_OCCUPANCY=0.5, PIPE_TENSOR_ACTIVE=0.75, DRAM_ACTIVE=1.0)
        new = page(uuid(0), SM_UTIL_RATIO=0.25, SM_OCCUPANCY_RATIO=0.5, TENSOR_UTIL_RATIO=0.75, DRAM_UTIL_RATIO=1.0)
        by_old, by_new = (to_columns(read_page(text, [uuid(0)])[uuid(0)]) for text in (old, new))
        assert by_old == by_new
        assert by_new[0] == {
            "sm_active_pct": 25.0,
            "sm_occupancy_pct": 50.0,
            "tensor_active_pct": 75.0,
            "dram_active_pct": 100.0,
        }

    def test_the_fields_are_those_of_dcgms_numbers(self) -> None:
        assert {metric.column: metric.field_id for metric in METRICS} == {
            "sm_active_pct": 1002,
            "sm_occupancy_pct": 1003,
            "tensor_active_pct": 1004,
            "dram_active_pct": 1005,
            "pcie_tx_mib_s": 1009,
            "pcie_rx_mib_s": 1010,
            "nvlink_tx_mib_s": 1011,
            "nvlink_rx_mib_s": 1012,
        }

    def test_the_lower_case_label_of_the_old_namespace_is_the_uuid_too(self) -> None:
        text = page(uuid(0), SM_ACTIVE=0.25).replace("UUID=", "uuid=")
        assert read_page(text, [uuid(0)]) == {uuid(0): {"DCGM_FI_PROF_SM_ACTIVE": 0.25}}

    @pytest.mark.parametrize("value", ["NaN", "-0.1", "+Inf", "41.2", "140737488355328.0", "9223372036854775794"])
    def test_a_value_that_is_no_ratio_is_null_and_not_a_number(self, value: str) -> None:
        """Blanks of DCGM, and percent where a ratio belongs."""
        text = page(uuid(0), SM_ACTIVE=0.5, DRAM_ACTIVE=0.25).replace("0.250000", value)
        values, nulls = to_columns(read_page(text, [uuid(0)])[uuid(0)])
        assert (values, nulls["dram_active_pct"]) == ({"sm_active_pct": 50.0}, Null.ERROR)

    def test_series_of_jobs_on_one_gpu_count_where_they_agree_and_not_where_they_contradict(self) -> None:
        one = page(uuid(0), SM_ACTIVE=0.5, DRAM_ACTIVE=0.5)
        same = one.replace('gpu="0"', 'gpu="0",hpc_job="1"')
        other = page(uuid(0), SM_ACTIVE=0.5, DRAM_ACTIVE=0.25)
        agreed = read_page(one + same, [uuid(0)])[uuid(0)]
        assert to_columns(agreed)[0] == {"sm_active_pct": 50.0, "dram_active_pct": 50.0}
        values, nulls = to_columns(read_page(one + other, [uuid(0)])[uuid(0)])
        assert (values, nulls["dram_active_pct"]) == ({"sm_active_pct": 50.0}, Null.ERROR)

    @at_most(max_examples=150, deadline=None)
    @given(st.text(alphabet='{}",=\\# \tUID-0aé\r\n\x00', max_size=60))
    def test_whatever_follows_a_metrics_name_is_read_or_refused_with_a_phrase(self, noise: str) -> None:
        """ValueError is the only way out: the thread tells it as the scrape's failure."""
        try:
            read_page(f'DCGM_FI_PROF_SM_ACTIVE{{UUID="{uuid(0)}",{noise}\n', [uuid(0)])
        except ValueError as error:
            assert "text format" in str(error)  # noqa: PT017


class TestFreshness:
    def test_a_row_is_written_for_values_that_replaced_others_and_says_how_far_back_they_reach(
        self, exporter: Exporter
    ) -> None:
        """The first values may be of any age, and the first to replace them may reach as far back."""
        rig = Rig(exporter)
        first, second, third = (page(uuid(0), SM_ACTIVE=share) for share in (0.1, 0.2, 0.3))
        rig.see(first)
        before_ns = time.monotonic_ns()
        rig.see(first)
        asked_ns = time.monotonic_ns()
        rig.see(second, second)
        assert rig.rows == []
        time.sleep(0.1)
        rig.see(third)
        after_ns = time.monotonic_ns()
        (row,) = rig.rows
        assert row["table"] == "samples_gpm"
        assert row["source"] == f"dcgm:{exporter.name}"
        assert row["sm_active_pct"] == pytest.approx(30)
        assert "dram_active_pct=not_exported" in row["nulls"]
        assert "sm_active_pct" not in row["nulls"]
        assert asked_ns < row["t_mono_ns"] < after_ns
        # Two of the longest interval that the exporter can have: from the last look at the first values to now.
        assert 200 < 2 * (row["t_mono_ns"] - asked_ns) / 1e6 < row["window_ms"]
        assert row["window_ms"] < 2 * (row["t_mono_ns"] - before_ns) / 1e6

    def test_values_that_are_only_repeated_make_no_row(self, exporter: Exporter) -> None:
        rig = Rig(exporter)
        rig.see(*(page(uuid(0), SM_ACTIVE=share) for share in (0.1, 0.2, 0.3, 0.3, 0.3, 0.4)))
        assert [row["sm_active_pct"] for row in rig.rows] == pytest.approx([30, 40])
        assert rig.watch.account()["devices"][0]["rows"] == 2

    def test_a_metric_that_disappears_does_not_make_the_others_new(self, exporter: Exporter) -> None:
        rig = Rig(exporter)
        rig.see(*(page(uuid(0), SM_ACTIVE=share, DRAM_ACTIVE=share) for share in (0.1, 0.2)))
        rig.see(page(uuid(0), SM_ACTIVE=0.2))
        assert rig.rows == []

    def test_two_series_that_always_contradict_each_other_do_not_make_the_rest_new(self, exporter: Exporter) -> None:
        rig = Rig(exporter)
        for share in (0.1, 0.2, 0.2):
            rig.see(page(uuid(0), SM_ACTIVE=share, DRAM_ACTIVE=0.5) + page(uuid(0), DRAM_ACTIVE=share))
        assert rig.rows == []

    def test_values_that_never_change_are_null_as_stale_and_told_once(
        self, exporter: Exporter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(dcgm, "STALE_S", 0.05)
        rig = Rig(exporter)
        rig.see(*(page(uuid(0), SM_ACTIVE=share) for share in (0.1, 0.2)))
        time.sleep(0.06)
        assert rig.see(*[page(uuid(0), SM_ACTIVE=0.2)] * 3) == [True] * 3
        assert len(rig.rows) == 3
        assert all(row["nulls"].count("=stale") == 9 and "sm_active_pct" not in row for row in rig.rows)
        ((kind, sentence, about),) = rig.told
        assert (kind, about) == ("dcgm", uuid(0))
        assert "has renewed nothing" in sentence
        rig.see(page(uuid(0), SM_ACTIVE=0.3))
        assert rig.rows[-1]["sm_active_pct"] == pytest.approx(30)


class TestTrouble:
    def test_a_gpu_that_is_not_listed_and_one_without_profiling_metrics_have_rows_with_the_reason(
        self, exporter: Exporter
    ) -> None:
        rig = Rig(exporter, num_gpus=2)
        assert rig.see(*[page(uuid(0))] * 3) == [True] * 3
        assert {(row["gpu_uuid"], row["nulls"].count("=not_exported")) for row in rig.rows} == {
            (uuid(0), 9),
            (uuid(1), 9),
        }
        assert rig.told == [
            ("dcgm", f"{exporter.url} gives no profiling metric (DCGM_FI_PROF_*) of it", uuid(0)),
            ("dcgm", f"{exporter.url} does not list this GPU", uuid(1)),
        ]

    def _refused(self, exporter: Exporter) -> str:
        """The account's error after two failed scrapes, of which one was told, with rows of nulls."""
        rig = Rig(exporter)
        began_s = time.monotonic()
        assert [rig.watch.look(), rig.watch.look()] == [False, False]
        assert time.monotonic() - began_s < 8
        assert [row["nulls"].count("=no_answer") for row in rig.rows] == [9, 9]
        account = rig.watch.account()
        assert (account["scrapes"], account["failed"]) == (0, 2)
        ((kind, sentence, about),) = rig.told
        assert (kind, about) == ("dcgm", None)
        assert sentence.startswith(f"{exporter.url}: {account['error']}; ")
        return str(account["error"])

    def test_a_web_page_is_not_taken_for_metrics(self, exporter: Exporter) -> None:
        exporter.headers = {"Content-Type": "text/html"}
        exporter.text = "<html>\n<head><title>GPU Exporter</title></head>\n</html>\n"
        assert "gives no DCGM metric" in self._refused(exporter)

    def test_a_line_that_is_no_metric_is_told_as_such(self, exporter: Exporter) -> None:
        exporter.text = f'DCGM_FI_PROF_SM_ACTIVE{{UUID="{uuid(0)}"}} many\n'
        assert "is not Prometheus's text format" in self._refused(exporter)

    def test_an_answer_without_end_is_given_up_at_the_size_that_no_exporter_reaches(self, exporter: Exporter) -> None:
        sent = []

        def endless(request: BaseHTTPRequestHandler) -> None:
            request.send_response(200)
            request.end_headers()
            while len(sent) < 1000:
                sent.append(request.wfile.write(b"# " + b"x" * 2**16 + b"\n"))

        exporter.send = endless
        assert self._refused(exporter) == "its answer is longer than 4 MiB"
        assert sum(sent) < 64 * 2**20

    def test_an_answer_that_drips_is_given_up(self, exporter: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(scrape, "WHOLE_S", 0.2)

        def drip(request: BaseHTTPRequestHandler) -> None:
            request.send_response(200)
            request.end_headers()
            for _ in range(100):
                request.wfile.write(b"#\n")
                time.sleep(0.05)

        exporter.send = drip
        assert "took longer than 0.2 s" in self._refused(exporter)

    def test_an_exporter_that_hangs_is_given_up(self, exporter: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(scrape, "TIMEOUT_S", 0.2)
        exporter.send = lambda request: time.sleep(1)
        assert "timed out" in self._refused(exporter)

    @pytest.mark.parametrize(("end", "missing"), [(-4, 0), (None, 100)])
    def test_an_answer_that_was_cut_off_gives_no_value(self, exporter: Exporter, end: int | None, missing: int) -> None:
        """Within a line, whose number may have lost digits, or between two, by the length that was promised."""
        exporter.text = page(uuid(0), SM_ACTIVE=0.5)[:end]
        exporter.headers = {"Content-Length": str(len(exporter.text) + missing)}
        assert self._refused(exporter) == "its answer was cut off"

    def test_an_exporter_that_is_loading_its_settings_anew_gives_an_empty_page(self, exporter: Exporter) -> None:
        assert self._refused(exporter) == "its answer was empty"

    def test_a_redirect_is_not_followed(self, exporter: Exporter) -> None:
        other = Exporter()
        other.text = page(uuid(0), SM_ACTIVE=0.5)
        exporter.status, exporter.headers = 302, {"Location": other.url}
        assert self._refused(exporter) == f"it redirects to {other.url}, which is not followed"
        other.die()
        assert other.asked == []

    def test_an_error_of_the_exporter_is_told_with_its_status(self, exporter: Exporter) -> None:
        exporter.status = 503
        assert self._refused(exporter) == "it answered with HTTP status 503"

    def test_what_does_not_speak_http_is_told(self, exporter: Exporter) -> None:
        exporter.send = lambda request: request.wfile.write(b"SSH-2.0-OpenSSH_9.2\r\n")
        assert "SSH-2.0" in self._refused(exporter)

    def test_tls_that_cannot_be_trusted_is_told(self, exporter: Exporter) -> None:
        rig = Rig(exporter, url=exporter.url.replace("http:", "https:"))
        assert rig.see(PAGE) == [False]
        assert "SSL" in str(rig.watch.account()["error"])

    def test_a_proxy_of_the_environment_is_not_asked(self, exporter: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
        """Compute nodes of Grace reach the internet through one, which knows nothing of their loopback."""
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        assert Rig(exporter).see(PAGE) == [True]

    def test_an_exporter_that_dies_and_comes_back_costs_only_the_time_between(
        self, exporter: Exporter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(dcgm, "BACKOFF_MAX_S", 0.1)
        rig = Rig(exporter, every_s=0.03)
        values = iter(range(1, 10**6))

        def fresh(request: BaseHTTPRequestHandler) -> None:
            request.send_response(200)
            request.end_headers()
            request.wfile.write(page(uuid(0), SM_ACTIVE=next(values) / 10**6).encode())

        exporter.send = fresh
        rig.watch.start()
        assert _until(lambda: len(rig.rows) > 2)
        exporter.die()
        assert _until(lambda: "no_answer" in rig.rows[-1]["nulls"] and rig.watch.account()["failed"] > 2)
        exporter.live()
        assert _until(lambda: "no_answer" not in rig.rows[-1]["nulls"])
        assert rig.watch.stop()
        assert len(rig.told) == 1
        assert rig.watch.account()["error"] is None
        num_rows = len(rig.rows)
        time.sleep(0.15)
        assert len(rig.rows) == num_rows
        assert len({row["tick_seq"] for row in rig.rows}) == num_rows

    def test_a_dead_exporter_is_asked_at_growing_intervals(
        self, exporter: Exporter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rig = Rig(exporter, every_s=0.05)
        exporter.die()
        rig.watch.start()
        time.sleep(1.0)  # at 0.05, 0.15, 0.35, 0.75 s
        assert rig.watch.stop()
        assert 3 <= rig.watch.account()["failed"] <= 4
        exporter.live()


def _as_a_job_has_it(config: DictConfig) -> DictConfig:
    """Without Hydra's own node."""
    return OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])


def _until(happened: Callable[[], bool], within_s: float = 5.0) -> bool:
    give_up_s = time.monotonic() + within_s
    while not happened():
        if time.monotonic() > give_up_s:
            return False
        time.sleep(0.01)
    return True


def test_a_lost_gpu_has_no_further_rows(exporter: Exporter) -> None:
    rig = Rig(exporter, num_gpus=2)
    rig.devices[0].lost = True
    rig.see(page("GPU-of-another-job", SM_ACTIVE=0.5))
    assert [row["gpu_uuid"] for row in rig.rows] == [uuid(1)]


def test_a_gpu_that_counts_gpm_is_never_asked_for(exporter: Exporter) -> None:
    rig = Rig(exporter, gpm=True)
    assert rig.see(page(uuid(0), SM_ACTIVE=0.5)) == [True]
    assert (exporter.asked, rig.rows) == ([], [])
    (device,) = rig.watch.account()["devices"]
    assert (device["polled"], device["reason"]) == (False, "gpm_preferred")


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
    def test_an_address_that_cannot_be_meant_is_refused_with_the_reason(
        self, tmp_path: Path, url: str, phrase: str
    ) -> None:
        with pytest.raises(ValueError, match=phrase):
            Spec(run_id="r", run_dir=str(tmp_path), uuids=[uuid(0)], dcgm_url=url)

    def test_a_wrong_address_is_refused_before_anything_is_submitted(self) -> None:
        lines = {
            "telemetry.dcgm_url": ["gpu=a40", "telemetry.dcgm_url=ftp://node"],
            "site.delta.gpus.a100.dcgm_url": ["gpu=a100", "site=delta", "sites.delta.gpus.a100.dcgm_url=ftp://node"],
        }
        with composer() as compose:
            for key, line in lines.items():
                with pytest.raises(UserError, match="must begin with http://") as refused:
                    compose(0, line)
                assert str(refused.value).startswith(f"{key}=ftp://node: ")

    def test_without_a_path_it_is_metrics_and_ipv6_keeps_its_brackets(self) -> None:
        plain, six = Endpoint.parse("http://node:9400"), Endpoint.parse("https://[::1]/")
        assert (plain.name, plain.url) == ("node:9400", "http://node:9400/metrics")
        assert (six.name, six.url) == ("[::1]:443", "https://[::1]:443/metrics")

    def test_a_sites_exporter_goes_to_the_points_of_its_gpu_and_our_own_word_goes_before_it(self) -> None:
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

    def test_who_is_asked_about_the_counters_does_not_make_another_experiment(self) -> None:
        with composer() as compose:
            one, other = (
                _as_a_job_has_it(compose(0, ["gpu=a100", f"telemetry.dcgm_url={url}"]).config)
                for url in ("http://a:9400", "null")
            )
        assert config_hash(one) == config_hash(other)


class TestSidecar:
    def _counting(self, exporter: Exporter, name: str) -> None:
        values = iter(range(1, 10**6))

        def fresh(request: BaseHTTPRequestHandler) -> None:
            request.send_response(200)
            request.end_headers()
            request.wfile.write(page(name, SM_ACTIVE=next(values) / 10**6, DRAM_ACTIVE=0.5).encode())

        exporter.send = fresh

    def test_rows_of_the_exporter_stand_beside_the_gpm_lanes_and_cannot_be_taken_for_them(
        self, exporter: Exporter, tmp_path: Path
    ) -> None:
        """The journal of a killed sidecar is told from its closed parts by GPU and number: both must not repeat."""
        self._counting(exporter, "REPLAY-a40-synthetic")
        sidecar = start(tmp_path, capture="a40-synthetic", slow_hz=5.0, dcgm_url=exporter.url, dcgm_every_s=0.1)
        time.sleep(1.1)
        account = sidecar.stop()
        assert account["status"] == "complete"
        table = rows(tmp_path, "samples_gpm").cast({"source": pl.String, "gpu_uuid": pl.String})
        by_source = dict(table.group_by("source").len().iter_rows())
        assert set(by_source) == {"replay:a40-synthetic", f"dcgm:{exporter.name}"}
        ours = table.filter(pl.col("source").str.starts_with("dcgm:"))
        assert len(ours) >= 3
        assert ours.select(pl.struct("gpu_uuid", "tick_seq").n_unique()).item() == len(ours)
        assert table.select(pl.struct("gpu_uuid", "tick_seq").n_unique()).item() == len(table)
        assert ours["dram_active_pct"].to_list() == [50.0] * len(ours)
        assert ours["window_ms"].min() > 200
        assert set(table.filter(~pl.col("source").str.starts_with("dcgm:"))["sm_active_pct"]) == {None}
        about = account["dcgm"]
        assert about == read_json(tmp_path / "telemetry.json")["dcgm"]
        assert (about["endpoint"], about["source"]) == (exporter.url, f"dcgm:{exporter.name}")
        assert (about["failed"], about["error"]) == (0, None)
        assert about["scrapes"] >= len(ours) + 2
        assert about["metrics"] == {"DCGM_FI_PROF_DRAM_ACTIVE": 1005, "DCGM_FI_PROF_SM_ACTIVE": 1002}
        assert about["devices"] == [
            {"uuid": "REPLAY-a40-synthetic", "polled": True, "reason": None, "rows": len(ours)},
        ]
        found, skips = parts.probe(tmp_path / "samples_gpm", "samples_gpm", "r-test")
        merged, _ = parts.read("samples_gpm", found, "r-test")
        assert (len(merged), skips) == (len(table), [])

    def test_where_gpm_answers_the_exporter_is_left_in_peace(self, exporter: Exporter, tmp_path: Path) -> None:
        self._counting(exporter, "REPLAY-h200-synthetic")
        sidecar = start(tmp_path, slow_hz=5.0, dcgm_url=exporter.url, dcgm_every_s=0.1)
        time.sleep(0.8)
        about = sidecar.stop()["dcgm"]
        assert exporter.asked == []
        assert about["devices"][0]["reason"] == "gpm_preferred"
        assert set(rows(tmp_path, "samples_gpm")["source"]) == {"replay:h200-synthetic"}

    def test_an_exporter_that_hangs_neither_disturbs_the_sampling_nor_the_end(
        self, exporter: Exporter, tmp_path: Path
    ) -> None:
        exporter.send = lambda request: time.sleep(5)
        sidecar = start(tmp_path, capture="a40-synthetic", slow_hz=5.0, dcgm_url=exporter.url, dcgm_every_s=0.2)
        assert _until(lambda: bool(exporter.asked))
        time.sleep(0.5)
        began_s = time.monotonic()
        account = sidecar.stop()
        assert time.monotonic() - began_s < 1.0
        assert account["status"] == "complete"
        gaps_ms = rows(tmp_path, "samples_fast")["t_mono_ns"].diff().drop_nulls() / 1e6
        assert gaps_ms.median() == pytest.approx(100, abs=3)
        assert gaps_ms.max() < 500

    def test_a_dead_exporter_is_one_event_and_the_run_is_whole(self, exporter: Exporter, tmp_path: Path) -> None:
        exporter.die()
        sidecar = start(tmp_path, capture="a40-synthetic", slow_hz=5.0, dcgm_url=exporter.url, dcgm_every_s=0.1)
        time.sleep(1.0)
        account = sidecar.stop()
        exporter.live()
        assert account["status"] == "complete"
        events = rows(tmp_path, "events").filter(pl.col("kind") == "dcgm")
        (sentence,) = events["detail"]
        assert "Connection refused" in sentence
        assert account["problems"] == [f"dcgm: {sentence}"] == sidecar.problems()
