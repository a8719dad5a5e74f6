"""Typed records: what is refused, what is tolerated, and how it is written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from inpaint_bench.core.records import (
    Device,
    Manifest,
    ManifestHead,
    Progress,
    Window,
    encode_record,
    read_record,
    write_record,
)
from inpaint_bench.core.schema import Status, WindowKind


def minimal() -> Manifest:
    return Manifest(schema_version=2, run_id="r-1", status=Status.RUNNING)


def changed(tmp_path: Path, **fields: object) -> Path:
    """A manifest on disk with some fields set."""
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({**json.loads(encode_record(minimal())), **fields}))
    return path


def test_a_record_survives_writing_and_reading(tmp_path: Path) -> None:
    record = minimal()
    record.devices = [Device(uuid="GPU-1", power_limit_w=300.0, nulls={"vbios": "no_permission"})]
    record.progress = Progress(step=3, images_per_s=1.5)
    write_record(tmp_path / "manifest.json", record)
    assert read_record(tmp_path / "manifest.json", Manifest) == record


def test_every_field_of_a_manifest_is_written_null_where_unknown() -> None:
    written = json.loads(encode_record(minimal()))
    assert list(written) == list(Manifest.__struct_fields__)
    assert written["ended_unix_ns"] is None


def test_seed_of_a_manifest_of_an_earlier_version_is_unknown(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    earlier = json.loads(encode_record(minimal()))
    del earlier["seed"]
    path.write_text(json.dumps(earlier))
    record = read_record(path, Manifest)
    assert record is not None
    assert record.seed is None


def test_fields_of_a_newer_version_are_ignored(tmp_path: Path) -> None:
    path = changed(tmp_path, colour="blue", devices=[{"uuid": "GPU-1", "lights": 3}])
    record = read_record(path, Manifest)
    assert record is not None
    assert record.devices == [Device(uuid="GPU-1")]


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"devices": [{"uuid": "GPU-1", "memory_mib": "much"}]}, r"str`.*`\$\.devices\[0\]\.memory_mib`"),
        ({"status": "on fire"}, r"on fire.*`\$\.status`"),
        ({"run_id": None}, r"null`.*`\$\.run_id`"),
    ],
)
def test_a_wrong_value_is_one_error_with_the_file_and_the_place_in_it(
    tmp_path: Path, fields: dict[str, object], place: str
) -> None:
    path = changed(tmp_path, **fields)
    with pytest.raises(ValueError, match=rf"{path}: .*{place}"):
        read_record(path, Manifest)


@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b"\xff\xfe", b'"\xff"'])
def test_a_damaged_file_is_an_error_with_its_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "windows.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=str(path)):
        read_record(path, list[Window])


def test_a_missing_file_is_no_record(tmp_path: Path) -> None:
    assert read_record(tmp_path / "manifest.json", Manifest) is None


def test_a_number_that_is_not_finite_is_written_as_null() -> None:
    record = minimal()
    record.workload_facts = {"loss": float("nan"), "rate": float("inf")}
    assert json.loads(encode_record(record))["workload_facts"] == {"loss": None, "rate": None}


def test_an_open_window_has_no_duration() -> None:
    window = Window(
        window_id="measure-0",
        kind=WindowKind.MEASURE,
        status=Status.RUNNING,
        t_start_mono_ns=1,
        t_start_unix_ns=1,
    )
    assert window.seconds is None
    window.t_end_mono_ns = 1_500_000_001
    assert window.seconds == 1.5


FIRST_USE_BY_TWO_THREADS = """
import sys, threading
import msgspec
from inpaint_bench.core.records import {function}
sys.setswitchinterval(1e-4)
names = [f"field_{{i}}" for i in range(8)]
value = {{name: {{"number": 1}} for name in names}}
for _ in range(10):
    inner = [(name, msgspec.defstruct(name, [("number", int)])) for name in names]
    record, barrier = msgspec.defstruct("Outer", inner), threading.Barrier(2)
    def use():
        barrier.wait()
        {function}({argument}, record)
    threads = [threading.Thread(target=use) for _ in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
print("done")
"""


@pytest.mark.parametrize(
    ("function", "argument"), [("to_record", "value"), ("decode_record", "msgspec.json.encode(value)")]
)
def test_threads_may_use_a_record_for_the_first_time_together(function: str, argument: str) -> None:
    """msgspec alone ends the process with a segmentation fault here."""
    code = FIRST_USE_BY_TWO_THREADS.format(function=function, argument=argument)
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (process.returncode, process.stdout) == (0, "done\n"), process.stderr


def test_batch_of_an_earlier_manifest_is_what_its_search_found(tmp_path: Path) -> None:
    """An earlier version kept auto where it now has a number, or null, beside what was requested."""
    path = tmp_path / "manifest.json"
    content = {"schema_version": 2, "run_id": "r-1", "status": "running", "batch": "auto"}
    for facts, found in (({"batch": 24}, 24), ({"batch": "x"}, None), (None, None)):
        path.write_text(json.dumps(content | {"workload_facts": facts}))
        record = read_record(path, Manifest)
        assert record
        assert (record.batch, record.batch_requested) == (found, "auto")
    path.write_text(json.dumps(content | {"batch": 16}))
    head = read_record(path, ManifestHead)
    assert head
    assert (head.batch, head.batch_requested) == (16, None)
