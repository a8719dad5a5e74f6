"""`doctor`: the probe over the vendor's binding, what it prints, and the sentences it ends with."""

from __future__ import annotations

import gzip
import io
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from inpaint_bench.cli import app
from inpaint_bench.cli.doctor import gpu_report
from inpaint_bench.core.files import read_json
from inpaint_bench.telemetry.devices import describe
from inpaint_bench.telemetry.nvml import cuda_context, probe
from inpaint_bench.telemetry.nvml.capture_file import SUFFIX, load
from inpaint_bench.telemetry.nvml.probe import Phases
from inpaint_bench.telemetry.nvml.queries import QUESTIONS
from inpaint_bench.telemetry.nvml.recorder import Recording
from inpaint_bench.telemetry.nvml.replay import Replay
from inpaint_bench.telemetry.sampling.streams import LANES, WINDOW
from inpaint_bench.telemetry.sources.health import read_health
from tests.telemetry.support import rows, start, uuid

from .fake_pynvml import FakeDriver, driver

SLEEPER = [sys.executable, "-c", "import sys; sys.stdin.read()"]
HERE = Path("/dev/nvidiactl").exists()


@contextmanager
def _on_the_gpu(fake: FakeDriver, listed_as: int | None = None) -> Iterator[tuple[int, str]]:
    """A child that the driver lists while it lives, under its own id or another."""
    with subprocess.Popen(SLEEPER, stdin=subprocess.PIPE) as child:
        fake.pids.append(child.pid if listed_as is None else listed_as)
        try:
            yield child.pid, "ready"
        finally:
            fake.pids.pop()
            child.kill()


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run of the command against a card that refuses some questions, with a child of ours on it."""
    folder = tmp_path_factory.mktemp("doctor")
    out, findings = folder / f"card{SUFFIX}", folder / "card.json"
    text = io.StringIO()
    with driver() as (fake, _, _), pytest.MonkeyPatch.context() as patch:
        patch.setattr("inpaint_bench.telemetry.sources.co_tenants._outside", lambda: False)  # wherever this test runs
        fake.watts = {186: (300.0, 0.1), 185: (300.0, 0.05), 83: (300.0, 0.02)}
        fake.fail = {"nvmlDeviceGetVbiosVersion": 4}
        fake.fields = {82: (3, 0)}
        fake.metric_codes = {60: 3}
        fake.memory.free -= 4096
        patch.setattr(cuda_context, "holding", lambda _: _on_the_gpu(fake))
        with _on_the_gpu(fake), redirect_stdout(text):
            began_s = time.monotonic()
            code = app.main(
                ["doctor", "gpu", "--seconds", "4", "--out", str(out), "--json", str(findings), "--note", "busy"]
            )
            took_s = time.monotonic() - began_s
    assert code == 0
    return {"text": text.getvalue(), "found": read_json(findings), "out": out, "took_s": took_s}


def test_the_probe_takes_the_time_it_was_given(probed: dict[str, Any]) -> None:
    assert 3 < probed["took_s"] < 6  # a busy machine
    assert probed["found"]["recorded_s"] > 1.5


def test_every_column_of_every_lane_and_every_fact_has_a_question() -> None:
    """A column that is added to a lane is probed too, and under the name of a function of the binding."""
    import pynvml

    asked = {name for question in QUESTIONS for name in question.feeds}
    for lane in LANES:
        assert {item.column for item in (*lane.fields, *lane.metrics)} <= asked
        assert {column for call in lane.calls for column in call.columns} <= asked
    assert WINDOW in asked
    replay = Replay(load("h200-synthetic"))
    (name,) = replay.uuids()
    assert set(describe(replay, name)) - {"uuid", "nulls", "memory_mib"} <= asked
    health = {key.partition("_")[0] for key in read_health(replay, name) if key != "nulls"}
    assert health <= {key.partition("_")[0] for key in asked}
    assert all(hasattr(pynvml, question.function) for question in QUESTIONS)


def test_every_refusal_is_said_with_its_code_its_call_and_its_meaning(probed: dict[str, Any]) -> None:
    refused = {entry["name"]: entry for entry in probed["found"]["answers"] if entry["code"]}
    assert set(refused) == {"temp_mem_c", "nvlink_rx_mib_s", "vbios"}
    assert (refused["temp_mem_c"]["code"], refused["temp_mem_c"]["answer"]) == (3, "not supported")
    assert (refused["temp_mem_c"]["function"], refused["temp_mem_c"]["id"]) == ("nvmlDeviceGetFieldValues", "field 82")
    assert (refused["vbios"]["null"], refused["nvlink_rx_mib_s"]["id"]) == ("no_permission", "metric 60")
    assert "memory temperature stays null" in probed["text"]
    assert probed["found"]["permissions"]["no_permission"] == ["vbios"]


def test_update_periods_are_those_of_the_card(probed: dict[str, Any]) -> None:
    periods = {name: entry["median_ms"] for name, entry in probed["found"]["updates"].items()}
    assert periods["power_instant_w"] == pytest.approx(100, abs=10)
    assert periods["power_avg1s_w"] == pytest.approx(50, abs=8)
    assert periods["energy_mj"] == pytest.approx(20, abs=6)


def test_every_call_and_every_lane_has_a_cost(probed: dict[str, Any]) -> None:
    costs = probed["found"]["costs"]
    assert [entry["feeds"] for entry in costs] == [list(question.feeds) for question in QUESTIONS]
    for entry in (*costs, *probed["found"]["lanes"].values()):
        assert 0 < entry["p50_us"] <= entry["max_us"]
        assert 100 > entry["n"] >= 3
        assert entry["p99_us"] is None  # of so few it would be the maximum under another name
    assert probe._spread([float(us) for us in range(1, 101)]) == {"n": 100, "p50_us": 50, "p99_us": 99, "max_us": 100}
    assert set(probed["found"]["lanes"]) == {lane.name for lane in LANES}


def test_what_each_field_costs_the_driver_is_told_apart(probed: dict[str, Any]) -> None:
    """One call asks for power and energy: on an H200 two of its fields take microseconds and one takes 3 ms."""
    told = {entry["column"]: entry for entry in probed["found"]["fields"]}
    assert set(told) == {item.column for lane in LANES for item in lane.fields}
    assert (told["energy_mj"]["p50_us"], told["energy_mj"]["lane"], told["energy_mj"]["field"]) == (3000, "fast", 83)
    assert told["power_instant_w"]["max_us"] == 2
    assert told["energy_mj"]["n"] > 10
    assert "driver's own time" in probed["text"]


def test_energy_is_compared_with_both_powers(probed: dict[str, Any]) -> None:
    energy = probed["found"]["energy"]
    assert energy["mean_w"] == pytest.approx(300, rel=0.02)
    assert energy["counter_over_instant"] == pytest.approx(1, abs=0.02)
    assert energy["counter_over_avg1s"] == pytest.approx(1, abs=0.02)
    assert energy["edge_error"] == pytest.approx(2 * 0.02 / energy["seconds"], rel=0.4)


def test_memory_that_does_not_add_up_is_said_in_bytes(probed: dict[str, Any]) -> None:
    assert probed["found"]["vram"]["unaccounted_bytes"] == 4096
    assert "leaves 4096 bytes over" in probed["text"]


def test_the_recording_holds_no_uuid_and_no_process_id_and_says_what_ran(probed: dict[str, Any]) -> None:
    raw = gzip.decompress(probed["out"].read_bytes()).decode()
    assert uuid(0) not in raw
    capture = load(str(probed["out"]))
    assert capture.meta["note"] == "busy"
    assert capture.calls["compute_processes"].value == [["ours"], ["ours"]]
    assert capture.calls["xids"].code == 0


def test_a_sidecar_replays_what_the_doctor_recorded(probed: dict[str, Any], tmp_path: Path) -> None:
    sidecar = start(tmp_path, capture=str(probed["out"]))
    time.sleep(1.3)
    (device,) = sidecar.stop()["devices"]
    assert device["processes"]["verdict"] == "alone"
    assert device["xids"]["reason"] is None
    assert device["nulls"] == {"vbios": "no_permission"}
    assert rows(tmp_path, "samples_slow")["nulls"].unique().to_list() == ["temp_mem_c=not_supported"]
    gpm = rows(tmp_path, "samples_gpm")
    assert gpm["nulls"].unique().to_list() == ["nvlink_rx_mib_s=not_supported"]
    recorded = load(str(probed["out"])).calls["gpm_window_ms"].value
    assert all(window == pytest.approx(min(recorded, key=lambda ms: abs(ms - window))) for window in gpm["window_ms"])


@pytest.mark.parametrize(
    ("listed_as", "outside", "verdict"),
    [(None, True, "yes"), (None, False, "this_namespace"), (4_000_000_000, True, "other_namespace")],
    ids=["own id", "own id in a container", "other id"],
)
def test_a_process_list_of_another_namespace_is_found_out(
    listed_as: int | None, outside: bool, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inpaint_bench.telemetry.sources.co_tenants._outside", lambda: outside)
    with driver() as (fake, nvml, handle):
        monkeypatch.setattr(cuda_context, "holding", lambda _: _on_the_gpu(fake, listed_as))
        assert probe.processes(nvml, handle, handle)["verdict"] == verdict


def test_a_process_list_that_hides_is_found_out_and_one_that_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def unseen(_: str) -> Iterator[tuple[int, str]]:
        yield 1234567, "ready"

    monkeypatch.setattr(cuda_context, "holding", unseen)
    with driver() as (fake, nvml, handle):
        assert probe.processes(nvml, handle, handle)["verdict"] == "hidden"
        fake.fail = dict.fromkeys(
            ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetComputeRunningProcesses_v2"), 4
        )
        found = probe.processes(nvml, handle, handle)
    assert found["verdict"] == "no_list"
    assert "no permission" in found["reason"]


@pytest.mark.skipif(HERE, reason="there is an NVIDIA driver here")
def test_without_cuda_the_child_says_why_it_holds_no_context() -> None:
    with driver() as (_, nvml, handle):
        found = probe.processes(nvml, handle, handle)
    assert (found["verdict"], found["reason"]) == ("not_tried", "libcuda.so.1 is not here")


def test_a_card_that_answers_little_is_described_with_what_that_means(capsys: pytest.CaptureFixture[str]) -> None:
    """No GPM, no energy counter, no power, no process list, no Xids: a card full of reasons, and no traceback."""
    refusing = {
        "nvmlGpmQueryDeviceSupport": 3,
        "nvmlDeviceGetFieldValues": 999,
        "nvmlDeviceGetComputeRunningProcesses": 4,
        "nvmlDeviceRegisterEvents": 4,
        "nvmlDeviceGetMemoryInfo": 3,
        "nvmlDeviceGetTotalEnergyConsumption": 3,
    }
    with driver() as (fake, _, _), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Phases, "of", lambda _: Phases(0.05, 2, 0.3))
        fake.fail = refusing
        assert app.main(["doctor", "gpu"]) == 0
    text = capsys.readouterr().out
    for words in (
        "bottleneck tier 2",
        "no joules per image",
        "the counter did not answer twice",
        "cannot be listened for: no permission (NVML code 4)",
        "no list, so co-tenants are not seen",
        "nvmlDeviceGetMemoryInfo: not supported (NVML code 3)",
    ):
        assert words in text


def test_a_constant_value_has_no_update_period() -> None:
    with driver() as (_, nvml, handle):
        updates = probe.update_periods(nvml, handle, 0.1)
    assert updates["energy_mj"]["changes"] == 0
    assert updates["energy_mj"]["median_ms"] is None


def test_zeros_and_refusals_while_polling_are_misses_and_no_values() -> None:
    """A zero between two values would be two changes that the card never made."""
    with driver() as (fake, nvml, handle):
        fake.fields = {186: (0, 0), 185: (3, 0)}
        updates = probe.update_periods(nvml, handle, 0.1)
    for name in ("power_instant_w", "power_avg1s_w"):
        assert updates[name]["misses"] == updates[name]["polls"] > 5
        assert updates[name]["changes"] == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--uuid", "MIG-1234"], "MIG slice"),
        (["--uuid", "0"], "not a GPU's UUID"),
        (["--uuid", uuid(7)], f"{uuid(7)} is not here; NVML lists {uuid(0)}"),
        (["--seconds", "nan"], "takes 2 to 3600 s"),
        (["--seconds", "1"], "takes 2 to 3600 s"),
        (["--out", "capture.json"], f"ends in {SUFFIX}"),
        (["--out", f"nowhere/capture{SUFFIX}"], "there is no folder nowhere"),
        (["--json", "."], ". is a folder"),
        (["--loop-from", "14"], "must lie within the recording"),
    ],
)
def test_a_wrong_word_is_one_sentence_before_anything_is_probed(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with driver() as (fake, _, _):
        assert app.main(["doctor", "gpu", *words]) == 2
        assert "nvmlDeviceGetFieldValues" not in fake.asked
    error = capsys.readouterr().err
    assert sentence in error
    assert len(error.splitlines()) == 1


def test_several_gpus_one_in_mig_mode_and_none_are_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    with driver() as (fake, _, _):
        fake.gpus = [uuid(0), uuid(1)]
        assert app.main(["doctor", "gpu"]) == 2
        assert f"2 GPUs are here; name one with --uuid: {uuid(0)}, {uuid(1)}" in capsys.readouterr().err
        fake.mig = 1
        assert app.main(["doctor", "gpu", "--uuid", uuid(1)]) == 2
        assert "is in MIG mode" in capsys.readouterr().err
        fake.gpus = []
        assert app.main(["doctor", "gpu"]) == 2
        assert "NVML lists no GPU" in capsys.readouterr().err


def test_a_gpu_that_is_lost_while_it_is_probed_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with driver() as (fake, _, _):
        fake.fail = {"nvmlDeviceGetUUID": 15}
        assert app.main(["doctor", "gpu", "--uuid", uuid(0)]) == 2
    assert "GPU is lost" in capsys.readouterr().err


@pytest.mark.skipif(HERE, reason="there is an NVIDIA driver here")
def test_without_a_driver_it_says_so_and_what_it_can_check_without(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["doctor", "gpu"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: this machine has no working NVIDIA driver")
    assert len(error.splitlines()) == 1
    assert app.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "python" in text
    assert "doctor gpu" in text


def test_a_probe_of_20_s_polls_for_3_and_a_longer_one_records_longer() -> None:
    usual, longer = Phases.of(20), Phases.of(60)
    assert (usual.poll_s, usual.rounds) == (3.0, 100)
    assert 12 < usual.record_s < 15
    assert (longer.poll_s, longer.rounds, longer.record_s) == (3.0, 100, usual.record_s + 40)


def test_a_card_is_printed_even_where_its_file_cannot_be_written(
    probed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that is full after 20 s of probing must not cost the findings."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "card.json")

    monkeypatch.setattr(gpu_report, "replace_json", full)
    monkeypatch.setattr(gpu_report, "probe", lambda *_: (probed["found"], Recording({}, {})))
    with driver():
        assert app.main(["doctor", "gpu", "--json", str(tmp_path / "card.json")]) == 2
    output = capsys.readouterr()
    assert "NVIDIA H999" in output.out
    assert output.err.splitlines() == ["error: not written: [Errno 28] No space left on device: 'card.json'"]
