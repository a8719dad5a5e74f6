"""Training to a number of steps, with validations and checkpoints between its windows, from wherever it was cut.

Whatever ends a run, the next one goes on from the last good checkpoint with the very numbers that an
unbroken run would have seen: nothing here draws from a random number generator.
"""

from __future__ import annotations

import logging
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inpaint_bench.core.config import BenchConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.schema import CHECKPOINTS, WindowKind
from inpaint_bench.core.signals import Ending, Terminated

from . import random_state
from .checkpoint import Checkpoint, CheckpointError, Checkpoints, identity, siblings
from .manifest import Manifest

if TYPE_CHECKING:
    from torch import Tensor

    from inpaint_bench.workloads import Workload

    from .loop import Loop

WORKLOAD, RANDOM = "workload.", "random."  # whose tensors they are

log = logging.getLogger(__name__)


class Training:
    """One attempt at it. Validations go into manifest["quality"], what became of checkpoints into "resumed"."""

    def __init__(
        self, bench: BenchConfig, run_dir: Path, manifest: Manifest, workload: Workload, loop: Loop, ending: Ending
    ) -> None:
        self.wanted, self.run_dir, self.manifest = bench.workload, run_dir, manifest
        self.workload, self.loop, self.ending = workload, loop, ending
        self.checkpoints = Checkpoints(
            run_dir / CHECKPOINTS, self.wanted.keep_checkpoints, identity(bench), siblings(run_dir)
        )
        self.validation: list[dict[str, Any]] = []
        self.resumed: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self._began = self._saved_step = 0  # the step that this start goes on from, and that of its last checkpoint
        self._saved: Path | None = None  # that checkpoint
        self._unsaved = False  # something was done since then, and the state is whole
        self._saved_s = time.monotonic()  # when one was last tried

    def run(self, train_steps: int) -> None:
        """Train until `train_steps` steps were done in all attempts together, then finish.

        A signal is answered by a checkpoint and Terminated, once the step or the validation that it came in is
        done. Raises CheckpointError where the last checkpoint cannot be written; one before it that cannot is
        told as a problem.
        """
        try:
            if self.wanted.resume:
                self._resume()
            if self.loop.step > train_steps:
                raise UserError(
                    f"workload.train_steps={train_steps}: {self.loop.step} steps were already trained here; "
                    "ask for at least as many, or take another run directory"
                )
            self._note()
            self._train(train_steps)
            with self.ending.held():
                if self._unsaved:
                    self._checkpoint()
            figures = self.workload.finish(self.run_dir)
        except Terminated as error:
            note = self._last_checkpoint()
            raise Terminated(error.signum, note, further=self._saved_step > self._began) from None
        self._note(**_plain(figures))

    def _train(self, train_steps: int) -> None:
        warm = self.loop.step + self.wanted.warmup_steps
        self._validate(train_steps)
        while self.loop.step < train_steps:
            with self.ending.held():
                self._steps(warm, train_steps)
            aside = self._validate(train_steps)
            if self._due() and self.loop.step < train_steps:
                aside = True
                with self.ending.held():
                    try:
                        self._checkpoint()
                    except CheckpointError as error:
                        self._problem(str(error))
            if aside:  # what the loader made meanwhile comes for nothing: those steps are not measured
                warm = max(warm, self.loop.step + self.workload.ahead)

    def _steps(self, warm: int, train_steps: int) -> None:
        """One window: to the next validation, a checkpoint that is due, a signal, or the end."""
        step, every = self.loop.step, self.wanted.validate_every
        ends = [train_steps]
        if step < warm:
            ends.append(warm)
        if every:
            ends.append(step - step % every + every)
        kind = WindowKind.WARMUP if step < warm else WindowKind.MEASURE
        self._unsaved = False  # nor can it be saved, where a step fails half-way
        self.loop.train(kind, min(ends), train_steps, self._due, self.ending.word)
        self._unsaved = True

    def _validate(self, train_steps: int) -> bool:
        """Whether it was time for it."""
        step, every = self.loop.step, self.wanted.validate_every
        if not every or (step % every and step < train_steps) or any(one["step"] == step for one in self.validation):
            return False
        # Held: half-way through, a workload may have other weights in place than those that it trains.
        with self.ending.held():
            with self.loop.aside(WindowKind.VALIDATION), random_state.kept():
                figures = self.workload.validate()
            if figures:
                self.validation.append({"step": step, **_plain(figures)})
                self._unsaved = True
                self._note()
        return True

    # --- checkpoints -----------------------------------------------------------------------------

    def _due(self) -> bool:
        every_s = self.wanted.checkpoint_every_s
        return every_s > 0 and time.monotonic() >= self._saved_s + every_s

    def _checkpoint(self) -> Path:
        try:
            with self.loop.aside(WindowKind.CHECKPOINT):
                path = self._save()
        finally:
            self._saved_s = time.monotonic()
        self._saved, self._saved_step, self._unsaved = path, self.loop.step, False
        return path

    def _save(self) -> Path:
        tensors, values = self.workload.state()
        shared, states = random_state.snapshot()
        named = {WORKLOAD + name: tensor for name, tensor in tensors.items()}
        named |= {RANDOM + name: tensor for name, tensor in shared.items()}
        whole = {
            "workload": values,
            "random": states,
            "validation": self.validation,
            "resumed": self.resumed,
            "losses_not_finite": self.loop.not_finite,
        }
        return self.checkpoints.save(self.loop.step, named, whole)

    def _last_checkpoint(self) -> str:
        """On a signal: what there is to go on from, in words. Never raises, the signal is what ended the run."""
        try:
            saved = self._checkpoint() if self._unsaved else self._saved
        except Exception as error:
            self._problem(str(error))
            return str(error)
        return f"it goes on from {saved.name}" if saved else ""

    def _resume(self) -> None:
        """Go on from the newest checkpoint that can be used, if there is one."""
        while (found := self.checkpoints.latest()) is not None:
            try:
                self.workload.restore(_of(WORKLOAD, found.tensors), found.values["workload"])
            except UserError as error:
                self.checkpoints.refuse(found.path, str(error))
                continue
            self._take(found)
            return
        if self.checkpoints.refused:
            log.warning("no checkpoint can be used: training begins at step 0")

    def _take(self, found: Checkpoint) -> None:
        values = found.values
        random_state.restore(_of(RANDOM, found.tensors), values["random"])
        self.loop.step, self.loop.not_finite = found.step, values["losses_not_finite"]
        self._began = self._saved_step = found.step
        self.validation = values["validation"]
        self.resumed = [*values["resumed"], {"step": found.step, "checkpoint": self._place(found.path)}]
        log.info("going on from %s, after %d steps", found.path, found.step)

    # --- the manifest ----------------------------------------------------------------------------

    def _problem(self, sentence: str) -> None:
        log.error("%s", sentence)
        self.problems.append(sentence)
        self._note()

    def _note(self, **quality: Any) -> None:
        """Copies: the manifest's thread reads them while training changes them."""
        refused = [{**one, "checkpoint": self._place(one["checkpoint"])} for one in self.checkpoints.refused]
        self.manifest.update(
            quality={**quality, "validation": list(self.validation)},
            resumed=[*self.resumed, *refused, *({"problem": one} for one in self.problems)],
        )

    def _place(self, checkpoint: Path | str) -> str:
        """From the run directory; a point that was moved as a whole stays readable."""
        return os.path.relpath(checkpoint, self.run_dir)


def _of(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _plain(value: Any) -> Any:
    """A number that is not finite becomes null: JSON has none."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
