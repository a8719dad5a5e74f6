"""Captures and their replay: what was recorded comes back, what was not is said to be missing."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import cast

import pytest

from benchmarks import make_synthetic_captures
from inpaint_bench.telemetry.nvml.api import NOT_IN_CAPTURE, Nvml, NvmlError, Xid
from inpaint_bench.telemetry.nvml.capture_file import PACKAGED, SUFFIX, CaptureError, available, load, save
from inpaint_bench.telemetry.nvml.queries import QUESTIONS
from inpaint_bench.telemetry.nvml.recorder import Recorder, record
from inpaint_bench.telemetry.nvml.replay import Replay
from inpaint_bench.telemetry.sampling.streams import FAST, GPM, SLOW, Reader
from inpaint_bench.telemetry.sources.co_tenants import tell_apart
from inpaint_bench.telemetry.sources.health import read_health
from tests.telemetry.support import FakeGpus, rows, small_capture, start, uuid


def test_the_energy_counter_never_steps_back_however_often_the_capture_is_looped(tmp_path: Path) -> None:
    """0.5 s of capture, 1.4 s of run: the counter goes on at the loop's rate, 10 J per 100 ms."""
    path = small_capture(tmp_path / f"tiny{SUFFIX}", [0, 500_000, 510_000, 520_000, 530_000], loop_from_ms=100)
    sidecar = start(tmp_path / "run", capture=str(path))
    time.sleep(1.4)
    sidecar.stop()
    fast = rows(tmp_path / "run", "samples_fast")
    assert fast["energy_mj"].diff().drop_nulls().min() >= 0
    looped = fast.filter(fast["energy_mj"] >= 500_000)
    seconds = (looped["t_mono_ns"][-1] - looped["t_mono_ns"][0]) / 1e9
    assert seconds > 1
    assert (looped["energy_mj"][-1] - looped["energy_mj"][0]) / seconds == pytest.approx(100_000, rel=0.1)
    assert "power_instant_w=not_in_capture" in fast["nulls"][0]


def test_what_a_gpu_answered_is_what_replay_answers_failures_included(tmp_path: Path) -> None:
    gpus = FakeGpus(1)
    gpus.fail[uuid(0)] = {"185:0": 3, "temperature_c": 4, "vbios": 4}
    recording = record(cast(Nvml, gpus), uuid(0), 0.35)
    path = tmp_path / f"fake{SUFFIX}"
    save(path, recording.meta, recording.calls)
    assert recording.meta["synthetic"] is False
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


def test_processes_and_xids_are_recorded_without_their_ids_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose a process is, is decided where it was recorded: the replaying machine knows nothing of it."""
    monkeypatch.setattr("inpaint_bench.telemetry.sources.co_tenants._outside", lambda: True)
    gpus = FakeGpus(1)
    gpus.processes = [os.getpid(), 0]
    gpus.xids = [Xid(uuid(0), 63)]
    recorder = Recorder(cast(Nvml, gpus), worker=os.getpid())
    assert recorder.compute_processes(uuid(0)) == [os.getpid(), 0]  # who records still gets the truth
    recorder.watch_xids([], uuid(0))
    recorder.next_xid([], 0)
    path = tmp_path / f"fake{SUFFIX}"
    save(path, {"duration_ms": 1000}, recorder.calls)
    capture = load(str(path))
    assert capture.calls["compute_processes"].value == [["ours", "unknown"]]
    replay = Replay(capture)
    (name,) = replay.uuids()
    found = tell_apart(replay.compute_processes(name), worker=1)
    assert (len(found.ours), len(found.strangers), len(found.unknown)) == (1, 0, 1)
    replay.watch_xids("xids", name)
    heard = [replay.next_xid("xids", 50) for _ in range(3)]
    assert [xid.number for xid in heard if xid] == [63]


@pytest.mark.parametrize("call", ["compute_processes", "watch_xids"])
def test_a_refused_process_list_or_registration_is_refused_again(call: str, tmp_path: Path) -> None:
    gpus = FakeGpus(1)
    gpus.fail[uuid(0)][call] = 4
    recording = record(cast(Nvml, gpus), uuid(0), 0.2)
    path = tmp_path / f"fake{SUFFIX}"
    save(path, recording.meta, recording.calls)
    device = start(tmp_path / "run", capture=str(path)).stop()["devices"][0]
    account = device["processes" if call == "compute_processes" else "xids"]
    assert account["reason"] == "no_permission"


@pytest.mark.parametrize("card", make_synthetic_captures.CARDS, ids=lambda card: card.name)
def test_a_synthetic_card_answers_as_its_chip_does_and_what_nobody_has_seen_is_not_in_it(
    card: make_synthetic_captures.Card,
) -> None:
    """GPM from Hopper on; no 1-s average on GA100; memory power from Hopper on; no memory temperature on GA102."""
    replay = Replay(load(card.name))
    (name,) = replay.uuids()
    codes: dict[str, int] = {}
    for question in QUESTIONS:
        answer = question.ask(replay, name) or question.ask(replay, name)  # GPM: the first read has no window
        assert answer is not None
        codes.update(zip(question.feeds, answer, strict=True))
    metrics = {"window_ms", *(item.column for item in GPM.metrics)}
    refused = {
        "a40-synthetic": {"power_mem_avg_w", "temp_mem_c", "mig_mode"} | metrics,
        "a100-synthetic": {"power_avg1s_w", "power_mem_avg_w"} | metrics,
        "h200-synthetic": set(),
    }
    assert {column for column, code in codes.items() if code == 3} == refused[card.name]
    unseen = {
        "a40-synthetic": {"vbios", "recovery_action"},
        "a100-synthetic": {"vbios", "recovery_action", "temp_mem_c"},
        "h200-synthetic": {"vbios"},
    }
    assert {column for column, code in codes.items() if code == NOT_IN_CAPTURE} == unseen[card.name]
    assert set(codes.values()) <= {0, 3, NOT_IN_CAPTURE}
    assert tell_apart(replay.compute_processes(name), worker=1).ours


@pytest.mark.parametrize("name", [card.name for card in make_synthetic_captures.CARDS])
def test_a_packaged_synthetic_capture_says_so_and_is_what_the_script_makes(name: str, tmp_path: Path) -> None:
    capture = load(name)
    assert capture.meta["synthetic"] is True
    assert "Not a measurement" in capture.meta["note"]
    (card,) = [card for card in make_synthetic_captures.CARDS if card.name == name]
    save(tmp_path / "again", *make_synthetic_captures.make(card))
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
