"""Checkpoints on disk: whole, in order, and refused where they are not what was written."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from inpaint_bench.core.config.config_hash import ALWAYS_HASHED
from inpaint_bench.core.paths import ROOT
from inpaint_bench.run.checkpoint import (
    DTYPES,
    LORA_KEYS,
    NOT_IDENTITY,
    CheckpointStore,
    _flatten,
    identity,
    preserve_rng_state,
    rng_state,
    set_rng_state,
    sibling_folders,
)

from .support import bench

IDENTITY = {"batch": 4, "model.name": "tiny"}


def checkpoints(folder: Path, keep: int = 3, identity: dict[str, Any] | None = None) -> CheckpointStore:
    return CheckpointStore(folder, keep, identity or IDENTITY)


def filled(folder: Path, *steps: int, keep: int = 3) -> CheckpointStore:
    """A folder with a checkpoint of each step; its one tensor is the step."""
    store = checkpoints(folder, keep)
    for step in steps:
        store.save(step, {"weight": torch.full((100,), float(step))}, {"step": step})
    return store


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


class TestSavedContent:
    def test_tensors_of_any_layout_and_type_are_restored_exactly(self, tmp_path: Path) -> None:
        base = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
        tensors = {
            "base": base,
            "shared": base,
            "view of it": base[1],
            "transposed": base.transpose(0, 3),
            "channels_last": base.to(memory_format=torch.channels_last),
            "expanded": torch.tensor([1.5]).expand(3, 4),
            "with gradient": torch.ones(3, requires_grad=True),
            "scalar": torch.tensor(-0.0),
            "empty": torch.zeros(0, 7),
            "not a number": torch.tensor([float("nan"), float("inf"), 1e-45]),
        }
        tensors |= {f"type {dtype}": torch.tensor([1, 0, 1]).to(dtype) for dtype in DTYPES}
        store = checkpoints(tmp_path / "checkpoints")
        path = store.save(7, tensors, {"nested": {"list": [1, None, 0.1]}})
        found = store.load_latest()
        assert found is not None
        assert (found.path, found.step) == (path, 7)
        assert found.values == {"nested": {"list": [1, None, 0.1]}}
        assert found.tensors.keys() == tensors.keys()
        for name, tensor in tensors.items():
            other = found.tensors[name]
            assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape)
            ours, theirs = (one.detach().contiguous().reshape(-1).view(torch.uint8) for one in (tensor, other))
            assert torch.equal(ours, theirs), name

    def test_is_readable_by_safetensors_and_holds_no_pickle(self, tmp_path: Path) -> None:
        path = checkpoints(tmp_path).save(1, {"a": torch.ones(3), "b": torch.tensor([True])}, {})
        assert names(path) == ["checkpoint.json", "tensors.safetensors", "values.json"]
        assert torch.equal(load_file(path / "tensors.safetensors")["a"], torch.ones(3))

    def test_loaded_tensors_do_not_depend_on_the_file(self, tmp_path: Path) -> None:
        store = filled(tmp_path, 5)
        found = store.load_latest()
        assert found is not None
        (found.path / "tensors.safetensors").write_bytes(b"")
        assert torch.equal(found.tensors["weight"], torch.full((100,), 5.0))

    def test_header_has_producer_time_identity_and_checksums(self, tmp_path: Path) -> None:
        path = checkpoints(tmp_path).save(3, {"a": torch.ones(3)}, {})
        content = json.loads((path / "checkpoint.json").read_text())["content"]
        assert (content["step"], content["identity"], content["schema_version"]) == (3, IDENTITY, 1)
        assert content["producer"].startswith("inpaint_bench ")
        assert abs(content["created_unix_ns"] - time.time_ns()) < 60e9
        assert content["files"]["tensors.safetensors"]["bytes"] == (path / "tensors.safetensors").stat().st_size


class TestPruning:
    def test_newest_are_kept(self, tmp_path: Path) -> None:
        filled(tmp_path, 1, 2, 30, 4, keep=2)
        assert names(tmp_path) == ["step-00000002", "step-00000004", "step-00000030"], "30 is not older than 4"
        filled(tmp_path, 31, keep=1)
        assert names(tmp_path) == ["step-00000031"]

    def test_second_checkpoint_of_a_step_gets_a_name_of_its_own(self, tmp_path: Path) -> None:
        store = filled(tmp_path, 5)
        second = store.save(5, {"weight": torch.zeros(1)}, {"second": True})
        found = store.load_latest()
        assert found is not None
        assert (second.name, found.values) == ("step-00000005.1", {"second": True})
        assert (tmp_path / "step-00000005").is_dir()

    def test_temporary_folders_of_a_killed_writer_are_removed_at_the_next_start(self, tmp_path: Path) -> None:
        filled(tmp_path, 5)
        (tmp_path / ".step-00000006.99.tmp").mkdir()
        (tmp_path / ".step-00000006.99.tmp" / "tensors.safetensors").write_bytes(b"half")
        assert names((store := checkpoints(tmp_path)).folder) == ["step-00000005"]
        assert store.load_latest() is not None


def flip(path: Path, where: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(where * (len(data) - 1))] ^= 0x10
    path.write_bytes(data)


def truncate(path: Path, where: float) -> None:
    os.truncate(path, int(where * path.stat().st_size))


class TestDamaged:
    @pytest.mark.parametrize("name", ["tensors.safetensors", "values.json", "checkpoint.json"])
    @pytest.mark.parametrize("where", [0.0, 0.3, 0.6, 0.99])
    @pytest.mark.parametrize("harm", [flip, truncate, lambda path, _: path.unlink()], ids=["flip", "cut", "missing"])
    def test_is_refused_by_name_and_the_previous_one_is_used(
        self, name: str, where: float, harm: Any, tmp_path: Path
    ) -> None:
        filled(tmp_path, 10, 20)
        harm(tmp_path / "step-00000020" / name, where)
        store = checkpoints(tmp_path)
        found = store.load_latest()
        assert found is not None
        assert (found.step, found.tensors["weight"][0]) == (10, 10.0)
        ((rejected, reason),) = store.rejected.items()
        assert rejected == tmp_path / "step-00000020"
        assert name in reason

    def test_is_removed_only_after_a_new_one_is_complete(self, tmp_path: Path) -> None:
        filled(tmp_path, 10, 20)
        flip(tmp_path / "step-00000020" / "values.json", 0.5)
        store = checkpoints(tmp_path, keep=1)
        store.load_latest()
        assert names(tmp_path) == ["step-00000010", "step-00000020"]
        store.save(12, {}, {})
        assert names(tmp_path) == ["step-00000012"]


class TestOtherRuns:
    def test_other_identity_is_refused_with_the_differing_keys_and_kept(self, tmp_path: Path) -> None:
        filled(tmp_path, 10)
        store = checkpoints(tmp_path, keep=1, identity={"batch": 8, "model.name": "tiny", "model.weights": "/sd15"})
        assert store.load_latest() is None
        assert list(store.rejected.values()) == [
            'another configuration: batch was 4, is 8; model.weights was null, is "/sd15"'
        ]
        store.save(20, {}, {})
        assert names(tmp_path) == ["step-00000010", "step-00000020"]

    def test_identity_covers_model_batch_and_seed_but_not_the_number_of_workers(self) -> None:
        ours = identity(bench())
        assert identity(bench("recipe.num_workers=2", "workload.train_steps=9", "out=elsewhere")) == ours
        for override in ("batch=4", "seed=1", "recipe.precision=bf16", "model.unet.layers_per_block=2", "data.seed=3"):
            assert identity(bench(override)) != ours
        assert json.loads(json.dumps(ours)) == ours

    def test_identity_covers_adapters_only_where_there_are_some(self) -> None:
        """Regression: a checkpoint written before there were adapters must not become one of another configuration."""
        assert not [key for key in identity(bench()) if "lora" in key or "text_encoder_2" in key]
        ranks = [identity(bench("recipe=[cpu,lora]", f"recipe.lora_rank={rank}")) for rank in (4, 8)]
        assert ranks[0] != ranks[1]
        assert ranks[0]["recipe.lora_targets"] == "attention"

    @pytest.mark.parametrize("removed", [{}, {"recipe.decode": "pillow"}])
    def test_identity_of_earlier_versions_with_every_field_is_the_same(
        self, tmp_path: Path, removed: dict[str, str]
    ) -> None:
        """They stored the defaults of all fields, also of one that is no longer there."""
        config = bench("model.guidance=2.5")
        nested = {block: vars(getattr(config, block)) for block in ("model", "data", "recipe")}
        left_out = {f"recipe.{name}" for name in (*NOT_IDENTITY, *LORA_KEYS)}
        every = {key: value for key, value in _flatten(nested) if key not in left_out}
        before = {**identity(config), **every, **removed}
        assert before["recipe.linears"] == "default"
        checkpoints(tmp_path, identity=before).save(5, {}, {})
        store = checkpoints(tmp_path, identity=identity(config))
        assert store.load_latest() is not None, store.rejected
        other = checkpoints(tmp_path, identity=identity(bench("recipe.linears=fp8")))
        assert other.load_latest() is None
        assert 'recipe.linears was "default", is "fp8"' in str(other.rejected)

    def test_field_that_is_added_later_is_part_of_the_identity_only_where_it_has_another_value(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = {key: value for key, value in identity(bench()).items() if key != "recipe.ema"}
        monkeypatch.setitem(ALWAYS_HASHED, "recipe", ALWAYS_HASHED["recipe"] - {"ema"})
        assert identity(bench()) == before, "and an earlier version reads what this one writes"
        checkpoints(tmp_path, identity=before).save(5, {}, {})
        assert checkpoints(tmp_path, identity=identity(bench())).load_latest() is not None
        store = checkpoints(tmp_path, identity=identity(bench("recipe.ema=true")))
        assert store.load_latest() is None
        assert list(store.rejected.values()) == ["another configuration: recipe.ema was false, is true"]

    def test_sibling_folders_exist_only_for_attempts(self, tmp_path: Path) -> None:
        for name in ("attempt-1", "attempt-2", "attempt-10"):
            (tmp_path / name).mkdir()
        assert sibling_folders(tmp_path / "attempt-2") == [
            tmp_path / "attempt-1" / "checkpoints",
            tmp_path / "attempt-10" / "checkpoints",
        ]
        assert sibling_folders(tmp_path / "other") == []

    def test_checkpoint_of_an_earlier_attempt_is_used_and_not_modified(self, tmp_path: Path) -> None:
        filled(tmp_path / "a", 10, 40)
        filled(tmp_path / "b", 30)
        flip(tmp_path / "a" / "step-00000040" / "values.json", 0.5)
        store = CheckpointStore(tmp_path / "own", 1, IDENTITY, [tmp_path / "a", tmp_path / "b"])
        found = store.load_latest()
        assert found is not None
        assert found.path == tmp_path / "b" / "step-00000030"
        store.save(2, {}, {})
        found = store.load_latest()
        assert found is not None
        assert found.step == 2, "an own one comes first"
        assert names(tmp_path / "a") == ["step-00000010", "step-00000040"]


WRITER = """
import sys, torch
from pathlib import Path
from inpaint_bench.run.checkpoint import CheckpointStore
store = CheckpointStore(Path(sys.argv[1]), 1, {"batch": 4, "model.name": "tiny"})
found = store.load_latest()
step = found.step if found else 0
print("ready", flush=True)
while True:
    step += 1
    store.save(step, {"weight": torch.full((200_000,), float(step))}, {"step": step})
"""


@pytest.mark.faults
def test_writer_killed_at_any_moment_leaves_a_loadable_checkpoint(tmp_path: Path) -> None:
    chance = random.Random(5)
    before = half_written = 0
    for _ in range(8):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(0.05 + 0.1 * chance.random())
        child.send_signal(signal.SIGKILL)
        child.communicate()
        half_written += any(name.startswith(".") for name in names(tmp_path))
        store = checkpoints(tmp_path)
        found = store.load_latest()
        assert found is not None
        assert store.rejected == {}
        assert found.step >= before
        assert torch.equal(found.tensors["weight"], torch.full((200_000,), float(found.step)))
        assert not any(name.startswith(".") for name in names(tmp_path))
        before = found.step
    assert before > 0
    assert half_written, "no kill hit a write: the test says nothing"


class TestRandomState:
    @staticmethod
    def draw() -> list[float]:
        return [float(torch.rand(1)), float(torch.randn(1)), np.random.normal(), random.gauss(0, 1), random.random()]

    def test_generators_continue_after_a_round_trip_through_json(self) -> None:
        self.draw()  # an odd number of Gaussians: NumPy and Python each hold one back
        tensors, values = rng_state()
        expected = [self.draw() for _ in range(700)]
        set_rng_state(tensors, json.loads(json.dumps(values)))
        assert [self.draw() for _ in range(700)] == expected

    def test_reading_the_state_draws_nothing(self) -> None:
        tensors, values = rng_state()
        expected = self.draw()
        set_rng_state(tensors, values)
        rng_state()
        assert self.draw() == expected

    def test_state_is_restored_after_a_block_that_raises(self) -> None:
        tensors, values = rng_state()
        expected = self.draw()
        set_rng_state(tensors, values)
        with pytest.raises(IndexError), preserve_rng_state():
            self.draw()[10]
        assert self.draw() == expected
