"""Captures and their replay: what was recorded comes back, what was not is said to be missing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import cast

import pytest

from inpaint_bench.telemetry import make_synthetic
from inpaint_bench.telemetry.capture import Recorder, record
from inpaint_bench.telemetry.capture import main as capture_main
from inpaint_bench.telemetry.health import read_health
from inpaint_bench.telemetry.lanes import FAST, SLOW, Reader
from inpaint_bench.telemetry.nvml import Nvml, NvmlError
from inpaint_bench.telemetry.recording import PACKAGED, SUFFIX, CaptureError, available, load, save
from inpaint_bench.telemetry.replay import Replay

from .support import FakeGpus, rows, small_capture, start, uuid


def test_the_energy_counter_never_steps_back_however_often_the_capture_is_looped(tmp_path: Path) -> None:
    """0.5 s of capture, 2 s of run: the counter goes on at the loop's rate, 10 J per 100 ms."""
    path = small_capture(tmp_path / f"tiny{SUFFIX}", [0, 500_000, 510_000, 520_000, 530_000], loop_from_ms=100)
    sidecar = start(tmp_path / "run", capture=str(path))
    time.sleep(2)
    sidecar.stop()
    fast = rows(tmp_path / "run", "samples_fast")
    assert fast["energy_mj"].diff().drop_nulls().min() >= 0
    looped = fast.filter(fast["energy_mj"] >= 500_000)
    seconds = (looped["t_mono_ns"][-1] - looped["t_mono_ns"][0]) / 1e9
    assert seconds > 1.5
    assert (looped["energy_mj"][-1] - looped["energy_mj"][0]) / seconds == pytest.approx(100_000, rel=0.1)
    assert "power_instant_w=not_in_capture" in fast["nulls"][0]


def test_what_a_gpu_answered_is_what_replay_answers_failures_included(tmp_path: Path) -> None:
    gpus = FakeGpus(1)
    gpus.fail[uuid(0)] = {"185:0": 3, "temperature_c": 4, "vbios": 4}
    meta, calls = record(cast(Nvml, gpus), uuid(0), 0.35)
    path = tmp_path / f"fake{SUFFIX}"
    save(path, meta, calls)
    assert uuid(0) not in path.read_bytes().decode("latin1")
    assert meta["synthetic"] is False
    replay = Replay(load(str(path)))
    (name,) = replay.uuids()
    assert Reader(FAST).read(replay, name).nulls == "power_avg1s_w=not_supported"
    slow = Reader(SLOW).read(replay, name)
    assert slow.nulls == "temp_gpu_c=no_permission"
    assert slow.values["vram_used_mib"] == 2048
    with pytest.raises(NvmlError, match="no permission"):
        replay.vbios(name)
    capture = load(str(path))
    assert len(capture.calls["field:186:0"].t_ms) == 4


def test_gpm_and_health_are_recorded_and_replayed(tmp_path: Path) -> None:
    gpus = FakeGpus(1)
    gpus.fail[uuid(0)] = {"gpm:10": 3, "remapped_rows": 4, "230:0": 3}
    recorder = Recorder(cast(Nvml, gpus))
    assert recorder.gpm(uuid(0), [2, 10]) is None
    recorder.gpm(uuid(0), [2, 10])
    health = read_health(cast(Nvml, recorder), uuid(0))
    path = tmp_path / f"fake{SUFFIX}"
    save(path, {"duration_ms": 1000}, recorder.calls)
    replay = Replay(load(str(path)))
    (name,) = replay.uuids()
    assert replay.gpm(name, [2, 10]) is None
    window = replay.gpm(name, [2, 10])
    assert window is not None
    assert [(answer.code, answer.value) for answer in window.metrics] == [(0, 2.0), (3, None)]
    assert read_health(replay, name) == health
    assert health["nulls"]["remapped_rows_failed"] == "no_permission"


@pytest.mark.parametrize("name", [card.name for card in make_synthetic.CARDS])
def test_a_packaged_synthetic_capture_says_so_and_is_what_the_script_makes(name: str, tmp_path: Path) -> None:
    capture = load(name)
    assert capture.meta["synthetic"] is True
    assert "Not a measurement" in capture.meta["note"]
    (card,) = [card for card in make_synthetic.CARDS if card.name == name]
    save(tmp_path / "again", *make_synthetic.make(card))
    assert load(name) == capture
    again = tmp_path / f"{name}{SUFFIX}"
    (tmp_path / "again").rename(again)
    assert load(str(again)) == capture


def test_packaged_captures_are_small_and_readable() -> None:
    assert {"a40-synthetic", "a100-synthetic", "h200-synthetic"} <= set(available())
    for name in available():
        assert load(name).calls
        assert (PACKAGED / f"{name}{SUFFIX}").stat().st_size < 200_000


def test_a_damaged_capture_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / f"broken{SUFFIX}"
    path.write_bytes(b"not gzip")
    with pytest.raises(CaptureError, match="broken"):
        load(str(path))


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is an NVIDIA driver here")
def test_recording_without_a_gpu_is_an_error_of_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert capture_main(["--out", str(tmp_path / f"x{SUFFIX}"), "--seconds", "1"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
