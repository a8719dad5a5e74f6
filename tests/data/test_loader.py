"""The stream of batches: its content, restricted to a split, and continued from any draw."""

from __future__ import annotations

import multiprocessing
import os
import signal
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from inpaint_bench.core.console import pluralize
from inpaint_bench.core.errors import UserError
from inpaint_bench.data.loader import EndlessShuffle

from .support import batches, draws, same, samples, synthetic, take


class TestBatches:
    def test_shapes_ranges_and_types_are_as_documented(self) -> None:
        batch = next(batches(synthetic(), 4))
        assert batch["image"].shape == batch["masked_image"].shape == (4, 3, 32, 32)
        assert batch["mask"].shape == (4, 1, 32, 32)
        assert batch["tokens"].shape == (4, 77)
        assert batch["latitude"].dtype == torch.float64
        assert -1 <= batch["image"].min() < batch["image"].max() <= 1
        assert set(batch["mask"].unique().tolist()) <= {0.0, 1.0}

    def test_masked_image_is_zero_exactly_under_the_mask(self) -> None:
        for batch in islice(batches(synthetic(), 4), 3):
            hole = batch["mask"].expand_as(batch["image"]).bool()
            assert not batch["masked_image"][hole].any()
            assert torch.equal(batch["masked_image"][~hole], batch["image"][~hole])

    def test_every_epoch_is_a_new_permutation(self) -> None:
        drawn = list(islice(EndlessShuffle(np.arange(50), seed=0), 100))
        first, second = [index for index, _ in drawn[:50]], [index for index, _ in drawn[50:]]
        assert sorted(first) == sorted(second) == list(range(50))
        assert first != second
        assert [draw for _, draw in drawn] == list(range(100))

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGBUS])
    def test_killed_worker_is_named_where_its_tensors_are_lost(self, number: signal.Signals) -> None:
        stream = batches(synthetic(), 2, "recipe.num_workers=1")
        next(stream)
        (worker,) = stream._iterator._workers  # type: ignore[union-attr]
        # As where the system delivers the worker's end late: PyTorch's own handler would speak first.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        try:
            os.kill(worker.pid, number)
            with pytest.raises(RuntimeError, match=r"is killed by signal: (Killed|Bus error)"):
                list(islice(stream, 100))
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            stream.close()

    def test_workers_are_forks_also_where_python_has_another_default(self) -> None:
        default = multiprocessing.get_start_method()
        multiprocessing.set_start_method("forkserver", force=True)  # as Python 3.14 has it
        try:
            stream = batches(synthetic(), 2, "recipe.num_workers=1")
            next(stream)
            (worker,) = stream._iterator._workers  # type: ignore[union-attr]
            assert f"{worker.pid}" in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            stream.close()
        finally:
            multiprocessing.set_start_method(default, force=True)

    def test_workers_are_limited_to_the_cores(self, caplog: pytest.LogCaptureFixture) -> None:
        cores = len(os.sched_getaffinity(0))
        settings = batches(synthetic(5), 2, f"recipe.num_workers={cores + 1}").settings
        assert settings["num_workers"] == {"requested": cores + 1, "effective": cores}
        assert f"but this job has {pluralize(cores, 'CPU core')}: the loader uses {cores}" in caplog.text

    def test_non_blocking_without_pinned_memory_is_not_effective(self) -> None:
        settings = batches(synthetic(), 2, "recipe.non_blocking=true").settings
        assert settings["non_blocking"] == {"requested": True, "effective": False}


class TestStart:
    @pytest.mark.parametrize("workers", [0, 2])
    def test_stream_started_at_any_draw_equals_the_rest_of_the_stream(self, workers: int) -> None:
        """Seven images, so that the cuts fall before, on and after the ends of epochs."""
        stream = take(batches(synthetic(7), 1), 24)
        for start in range(17):
            rest = take(batches(synthetic(7), 1, f"recipe.num_workers={workers}", start=start), 3)
            assert same(rest, stream[start : start + 3]), start

    def test_samples_do_not_depend_on_the_batch_size(self) -> None:
        threes = take(batches(synthetic(7), 3, start=5), 2)
        assert draws(threes) == list(range(5, 11))
        singles = take(batches(synthetic(7), 1), 11)[5:]
        assert torch.equal(torch.cat([b["mask"] for b in threes]), torch.cat([b["mask"] for b in singles]))

    def test_start_at_a_huge_draw_is_immediate(self) -> None:
        (batch,) = take(batches(synthetic(7), 2, start=10**12), 1)
        assert batch["draw"].tolist() == [10**12, 10**12 + 1]


class TestIndices:
    def test_only_the_given_images_are_drawn_each_once_per_epoch(self) -> None:
        chosen = np.array([1, 4, 6])
        taken = take(batches(synthetic(7), 3, indices=chosen), 5)
        assert all(sorted(batch["index"].tolist()) == [1, 4, 6] for batch in taken)

    def test_empty_selection_is_refused(self) -> None:
        with pytest.raises(UserError, match=r"data\.validation_share"):
            batches(synthetic(7), 3, indices=np.array([], np.int64))


class TestSamplesWithoutPixels:
    def test_samples_have_positions_and_texts_and_decode_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        source = synthetic(7)
        monkeypatch.setattr(source, "pixels", lambda index: pytest.fail("an image was read"))
        without = samples(source, pixels=False)
        sample = without[3, 11]
        assert set(sample) == {"index", "draw", "latitude", "longitude", "tokens", "text_id"}
        assert (sample["index"].item(), sample["draw"].item()) == (3, 11)
        assert without.distinct_texts[int(sample["text_id"])] == source.texts[3]
        assert torch.equal(without.tokens[sample["text_id"]], sample["tokens"])
