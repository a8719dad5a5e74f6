"""`doctor gpu` over NVIDIA's binding with a fake driver: findings, printed text, recording and exit code."""

from __future__ import annotations

import gzip
import io
import os
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from inpaint_bench.cli import app, doctor
from inpaint_bench.telemetry.nvml import probe
from inpaint_bench.telemetry.nvml.links import links
from inpaint_bench.telemetry.nvml.probe import GpuFindings, examine_gpu
from inpaint_bench.telemetry.nvml.replay import SUFFIX, load
from inpaint_bench.telemetry.sampling.streams import STREAMS, WINDOW
from tests.telemetry.support import rows, start, uuid

from .nvml.fake_pynvml import driver

pytestmark = pytest.mark.slow

HAS_DRIVER = Path("/dev/nvidiactl").exists()


class Examined:
    """One run of the command against a card that refuses some calls."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / f"card{SUFFIX}"
        text = io.StringIO()
        with driver() as (fake, _, _), redirect_stdout(text):
            fake.watts = {186: (300.0, 0.1), 185: (300.0, 0.05), 83: (300.0, 0.02)}
            fake.fail = {"nvmlDeviceGetVbiosVersion": 4}
            fake.fields = {82: (3, 0)}
            fake.metric_codes = {60: 3}
            fake.pids = [os.getpid()]
            start_s = time.monotonic()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(probe, "examine_gpu", self._examine)
                code = app.main(["doctor", "gpu", "--seconds", "4", "--out", str(self.out), "--note", "busy"])
            self.duration_s = time.monotonic() - start_s
        assert code == 0
        self.text = text.getvalue()
        self.calls = {call.call: call for call in self.findings.calls}

    def _examine(self, *arguments: Any) -> GpuFindings:
        self.findings = examine_gpu(*arguments)
        return self.findings


@pytest.fixture(scope="module")
def examined(tmp_path_factory: pytest.TempPathFactory) -> Examined:
    return Examined(tmp_path_factory.mktemp("doctor"))


def test_examination_takes_the_requested_time(examined: Examined) -> None:
    assert 3 < examined.duration_s < 10  # a busy machine
    assert load(str(examined.out)).meta.duration_ms > 1500


def test_every_column_and_every_fact_is_examined(examined: Examined) -> None:
    columns = {column for call in examined.findings.calls for column in call.feeds.split(", ")}
    for stream in STREAMS:
        assert {item.columns[0] for item in (*stream.fields, *stream.gpm)} <= columns
        assert {column for query in stream.queries for column in query.columns} <= columns
    assert WINDOW in columns
    others = {
        "name",
        "vbios",
        "mig_mode",
        "ecc_volatile",
        "remapped_rows",
        "power_limit_mw",
        "compute_processes",
        "xids",
    }
    assert others <= examined.calls.keys()


def test_every_failed_call_is_missing_with_its_reason_and_code(examined: Examined) -> None:
    missing = {call.feeds: call for call in examined.findings.calls if call.missing}
    assert set(missing) == {"temp_mem_c", "nvlink_rx_mib_s", "vbios"}
    assert missing["temp_mem_c"].error == "not supported (NVML code 3)"
    assert (missing["vbios"].missing, missing["nvlink_rx_mib_s"].call) == ("no_permission", "gpm:60")
    assert missing["temp_mem_c"].num_valid == 0 < missing["temp_mem_c"].num_calls
    for text in ("missing: null in every run", "temp_mem_c", "no permission (NVML code 4)"):
        assert text in examined.text


def test_update_periods_are_those_of_the_card(examined: Examined) -> None:
    periods = {column: period.median_ms for column, period in examined.findings.updates.items()}
    assert periods["power_instant_w"] == pytest.approx(100, abs=10)
    assert periods["power_avg1s_w"] == pytest.approx(50, abs=8)
    assert periods["energy_mj"] == pytest.approx(20, abs=6)


def test_every_call_has_a_cost(examined: Examined) -> None:
    for name in ("utilization", "memory", "fields:186:0,185:0,83:0", "gpm_window_ms", "compute_processes"):
        call = examined.calls[name]
        assert call.median_us is not None
        assert call.max_us is not None
        assert 0 < call.median_us <= call.max_us


def test_cost_of_a_field_is_the_drivers_own(examined: Examined) -> None:
    """One call reads power and energy: on an H200 two of its fields take microseconds and one takes 3 ms."""
    assert (examined.calls["field:83:0"].median_us, examined.calls["field:83:0"].feeds) == (3000, "energy_mj")
    assert examined.calls["field:186:0"].max_us == 2
    assert examined.calls["field:83:0"].num_calls > 10


def test_recording_holds_no_uuid_and_no_process_id_and_the_note(examined: Examined) -> None:
    raw = gzip.decompress(examined.out.read_bytes()).decode()
    assert uuid(0) not in raw
    capture = load(str(examined.out))
    assert capture.meta.note == "busy"
    assert capture.calls["compute_processes"].value == [None, None]
    assert capture.calls["xids"].codes == [0]


@pytest.mark.subprocess
def test_sidecar_replays_the_recording(examined: Examined, tmp_path: Path) -> None:
    sidecar = start(tmp_path, capture=str(examined.out))
    time.sleep(1.3)
    (device,) = sidecar.stop().devices
    assert (device.processes.reason, device.xids.reason) == ("not_in_capture", "not_in_capture")
    assert device.nulls == {"vbios": "no_permission"}
    assert rows(tmp_path, "samples_slow")["nulls"].unique().to_list() == ["temp_mem_c=not_supported"]
    gpm = rows(tmp_path, "samples_gpm")
    assert gpm["nulls"].unique().to_list() == ["nvlink_rx_mib_s=not_supported"]
    recorded = load(str(examined.out)).calls["gpm_window_ms"].value
    assert all(window == pytest.approx(min(recorded, key=lambda ms: abs(ms - window))) for window in gpm["window_ms"])


def test_card_that_refuses_most_calls_is_described_with_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    """No GPM, no energy counter, no power, no process list, no Xids: reasons everywhere, and no traceback."""
    with driver() as (fake, _, _):
        fake.fail = {
            "nvmlGpmQueryDeviceSupport": 3,
            "nvmlDeviceGetFieldValues": 999,
            "nvmlDeviceGetComputeRunningProcesses": 4,
            "nvmlDeviceRegisterEvents": 4,
            "nvmlDeviceGetMemoryInfo": 3,
            "nvmlDeviceGetTotalEnergyConsumption": 3,
        }
        assert app.main(["doctor", "gpu", "--seconds", "2"]) == 0
    missing = capsys.readouterr().out.partition("missing: null in every run")[2]
    lines = {line.split()[0]: line for line in missing.splitlines() if line.strip()}
    assert "not_supported" in lines["sm_active_pct"]
    assert "error" in lines["energy_mj"]
    assert "no_permission" in lines["compute_processes"]
    assert "no permission (NVML code 4)" in lines["xids"]
    assert "not supported (NVML code 3)" in lines["vram_total_mib,"]
    assert "not supported (NVML code 3)" in lines["total_energy_mj"]


def test_constant_value_has_no_update_period() -> None:
    with driver() as (_, nvml, handle):
        updates = probe.update_periods(nvml, handle, 0.1)
    assert updates["energy_mj"].changes == 0
    assert updates["energy_mj"].median_ms is None


def test_zeros_and_failures_while_polling_are_no_values() -> None:
    """A zero between two values would be two changes that the card never made."""
    with driver() as (fake, nvml, handle):
        fake.fields = {186: (0, 0), 185: (3, 0)}
        updates = probe.update_periods(nvml, handle, 0.5)
    for name in ("power_instant_w", "power_avg1s_w"):
        assert updates[name].failed == updates[name].polls > 5
        assert updates[name].changes == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--uuid", "MIG-1234"], "MIG slice"),
        (["--uuid", "0"], "is not a GPU UUID"),
        (["--uuid", uuid(7)], f"{uuid(7)} does not exist here; NVML lists {uuid(0)}"),
        (["--seconds", "nan"], "takes 2 to 3600 s"),
        (["--seconds", "1"], "takes 2 to 3600 s"),
        (["--out", "capture.json"], f"ends in {SUFFIX}"),
        (["--out", f"nowhere/capture{SUFFIX}"], "nowhere is not a writable folder"),
    ],
)
def test_wrong_option_is_one_sentence_before_anything_is_examined(
    options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with driver() as (fake, _, _):
        assert app.main(["doctor", "gpu", *options]) == 2
        assert "nvmlDeviceGetFieldValues" not in fake.called
    error = capsys.readouterr().err
    assert sentence in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("changes", "kind", "gb_s"),
    [
        ({}, "4 NVLinks", 100),  # by switches, all of them
        ({"remotes": [0, 1, 0, 0]}, "1 NVLink", 25),  # one of four leads to the other GPU
        ({"fail": {"nvmlDeviceGetNvLinkState": 3}}, "PCIe between NUMA nodes", 31.5),
        ({"fail": {"nvmlDeviceGetNvLinkState": 3, "nvmlDeviceGetTopologyCommonAncestor": 3}}, "unknown: ", None),
        ({"fail": {"nvmlDeviceGetNvLinkState": 3, "nvmlDeviceGetMaxPcieLinkGeneration": 3}}, "PCIe between", None),
        ({"fields": {164: (3, 0), 84: (0, 0), 90: (3, 0)}}, "4 NVLinks", None),
    ],
)
def test_link_of_two_gpus(changes: dict[str, Any], kind: str, gb_s: float | None) -> None:
    with driver() as (fake, nvml, _):
        fake.gpus, fake.fields = [uuid(0), uuid(1)], {164: (3, 0), 84: (0, 25_000)}
        vars(fake).update(changes)
        (link,) = links(nvml, fake.gpus)
    assert link.gpus == (0, 1)
    assert link.kind.startswith(kind)
    assert link.gb_s == (gb_s and pytest.approx(gb_s, rel=1e-3))


@pytest.mark.subprocess
def test_several_gpus_are_told_with_their_links_and_a_real_all_reduce(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over gloo where there is no GPU."""
    monkeypatch.setattr(doctor, "ALL_REDUCE_MIB", 1)
    with driver() as (fake, _, _):
        fake.gpus, fake.fields = [uuid(0), uuid(1)], {164: (0, 25_000)}
        assert app.main(["doctor", "gpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if "NVLinks" in line] == [["GPU", "0", "GPU", "1", "4", "NVLinks", "100"]]
    (measured,) = [line for line in lines if line.startswith("all-reduce of 1 MiB over 2 GPUs: ")]
    assert "GB/s bus bandwidth, " in measured
    assert measured.endswith("of what the slowest link carries one way")
    assert f"choose one with --uuid: {uuid(0)}, {uuid(1)}" in lines[-1]


def test_recording_of_several_gpus_mig_mode_and_no_gpu_are_refused_in_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with driver() as (fake, _, _):
        fake.gpus = [uuid(0), uuid(1)]
        assert app.main(["doctor", "gpu", "--out", str(tmp_path / f"card{SUFFIX}")]) == 2
        assert f"choose one with --uuid: {uuid(0)}, {uuid(1)}" in capsys.readouterr().err
        fake.mig = 1
        assert app.main(["doctor", "gpu", "--uuid", uuid(1)]) == 2
        assert "is in MIG mode" in capsys.readouterr().err
        fake.gpus = []
        assert app.main(["doctor", "gpu"]) == 2
        assert "NVML lists no GPU" in capsys.readouterr().err


def test_gpu_lost_during_the_examination_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with driver() as (fake, _, _):
        fake.fail = {"nvmlDeviceGetUUID": 15}
        assert app.main(["doctor", "gpu", "--uuid", uuid(0)]) == 2
    assert "gpu is lost (NVML code 15)" in capsys.readouterr().err


@pytest.mark.subprocess
@pytest.mark.skipif(HAS_DRIVER, reason="there is an NVIDIA driver here")
def test_without_a_driver_doctor_gpu_says_so_and_doctor_checks_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["doctor", "gpu"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: this machine has no working NVIDIA driver")
    assert len(error.splitlines()) == 1
    assert app.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "python" in text
    assert "doctor gpu" in text


def test_findings_are_printed_even_if_the_recording_cannot_be_saved(
    examined: Examined, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that is full after 20 s must not cost the findings."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "card")

    monkeypatch.setattr(doctor, "save", full)
    monkeypatch.setattr(probe, "examine_gpu", lambda *_: examined.findings)
    with driver():
        assert app.main(["doctor", "gpu", "--out", str(tmp_path / f"card{SUFFIX}")]) == 2
    output = capsys.readouterr()
    assert "NVIDIA H999" in output.out
    assert output.err.splitlines() == ["error: the recording was not saved: [Errno 28] No space left on device: 'card'"]
