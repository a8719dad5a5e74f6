"""Training to a number of steps, with validations and checkpoints between the windows, from the last checkpoint on.

A resumed training computes the numbers that an unbroken one would have computed: nothing here draws from a random
number generator.
"""

import logging
import os
import time
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.records import Quality, ResumeEvent, decode_record, to_record
from inpaint_bench.core.schema import CHECKPOINTS, WindowKind
from inpaint_bench.core.signals import StopSignal, Terminated
from inpaint_bench.core.stages import stage
from inpaint_bench.core.workloads.finetune_inpaint import finetune_keys
from inpaint_bench.models.parallel.data_parallel import Command, announce
from inpaint_bench.workloads import TrainingWorkload

from . import checkpoint
from .checkpoint import CheckpointError
from .loop import Loop, WindowPlan
from .manifest import ManifestFile

WORKLOAD, RNG = "workload.", "random."  # prefixes of the tensors in a checkpoint

log = logging.getLogger(__name__)


class TrainerState(msgspec.Struct, kw_only=True):
    """What a checkpoint holds besides tensors."""

    workload: dict[str, Any]
    random: dict[str, Any]
    validation: list[dict[str, Any]]
    resumed: list[ResumeEvent]
    losses_not_finite: int


class Trainer:
    """One attempt at a training. Validations go to manifest.quality, the history of checkpoints to manifest.resumed."""

    def __init__(
        self,
        bench: BenchConfig,
        manifest: ManifestFile,
        workload: TrainingWorkload,
        loop: Loop,
        stop_signal: StopSignal,
    ) -> None:
        self.config, self.run_dir, self.manifest = finetune_keys(bench), manifest.run_dir, manifest
        self.workload, self.loop, self.stop_signal, self.ranks = workload, loop, stop_signal, bench.ranks
        self.checkpoints = checkpoint.CheckpointStore(
            self.run_dir / CHECKPOINTS,
            self.config.keep_checkpoints,
            checkpoint.identity(bench),
            checkpoint.sibling_folders(self.run_dir),
        )
        self.validation: list[dict[str, Any]] = []
        self.resumed: list[ResumeEvent] = []
        self.problems: list[ResumeEvent] = []
        self._first_step = self._saved_step = 0  # at which this start began, and of its last checkpoint
        self._saved: Path | None = None  # the last checkpoint, of an earlier start too
        self._saved_s = time.monotonic()  # when one was last attempted
        self._dirty = False  # the state is consistent, and newer than the last checkpoint

    def run(self, train_steps: int) -> None:
        """Train until all attempts together have done `train_steps` steps, then finish.

        On a signal, save a checkpoint at the end of the current step or validation and raise Terminated; on a second
        Ctrl-C, raise it at once. Raises CheckpointError if the last checkpoint cannot be written.
        """
        try:
            if self.config.resume:
                self._resume()
            if self.loop.step > train_steps:
                raise UserError(
                    f"workload.train_steps={train_steps}: {self.loop.step} steps were already trained here; "
                    "set at least as many, or choose another run directory"
                )
            self._update_manifest()
            # The manifest says by now where this start resumed: a kill may come at any step.
            self._train(train_steps)
            self.loop.check_losses()
            with self.stop_signal.deferred():
                if self._dirty:
                    self._save_checkpoint()
            # The last step is saved: a signal during this evaluation, which may take minutes, costs no training.
            with stage("closing"):
                results = self.workload.finish(self.run_dir)
        except Terminated as error:
            # Raised again with what the worker needs to decide whether a requeue would get further.
            note = self._checkpoint_on_signal(error)
            raise Terminated(error.signum, note, progressed=self._saved_step > self._first_step) from None
        self._update_manifest(**_json_safe(results))

    def _train(self, train_steps: int) -> None:
        # Every start warms up: a resumed one compiles and allocates anew.
        warm_step = self.loop.step + self.config.warmup_steps  # steps before this one are not measured
        # At step 0; after a resume, if the validation of the checkpoint's step is missing.
        self._validate(train_steps)
        while self.loop.step < train_steps:
            with self.stop_signal.deferred():
                self._run_window(warm_step, train_steps)
            paused = self._validate(train_steps)
            # After the last step `run` saves one, whether it is due or not.
            if self._checkpoint_due() and self.loop.step < train_steps:
                paused = True
                with self.stop_signal.deferred():
                    try:
                        self._save_checkpoint()
                    # A full disk costs this checkpoint, not the training: the next one is tried when it is due.
                    except CheckpointError as error:
                        self._record_problem(str(error))
            if paused:
                # Batches that the loader prefetched meanwhile cost the next steps no waiting: not measured either.
                warm_step = max(warm_step, self.loop.step + self.workload.prefetched_batches)

    def _run_window(self, warm_step: int, train_steps: int) -> None:
        """Train to the end of the warm-up, the next validation or the last step; ends early for a checkpoint."""
        step, every = self.loop.step, self.config.validate_every
        # The window ends at the first of these steps.
        ends = [train_steps]
        if step < warm_step:
            ends.append(warm_step)
        if every:
            ends.append(step - step % every + every)
        self._dirty = False  # if a step fails half-way, the state is not consistent
        self.loop.run(
            WindowPlan(
                kind=WindowKind.WARMUP if step < warm_step else WindowKind.MEASURE,
                steps=min(ends) - step,
                steps_total=train_steps,
                stream_rows=True,
                should_stop=self._checkpoint_due,
                stop_signal=lambda: self.stop_signal.name,
            )
        )
        self._dirty = True

    def _validate(self, train_steps: int) -> bool:
        """Validate if it is due at this step. Return whether it was."""
        step, every = self.loop.step, self.config.validate_every
        due = every and (step % every == 0 or step >= train_steps)
        if not due or any(entry["step"] == step for entry in self.validation):
            return False
        # Deferred: during a validation, averaged weights may stand in for those that are trained.
        with self.stop_signal.deferred():
            with self.loop.window(WindowKind.VALIDATION), checkpoint.preserve_rng_state():
                metrics = self.workload.validate()
            if metrics:
                # The result belongs to the state: a run that resumes here must not validate this step again.
                self.validation.append({"step": step, **_json_safe(metrics)})
                self._dirty = True
                self._update_manifest()
        return True

    # --- checkpoints -----------------------------------------------------------------------------

    def _checkpoint_due(self) -> bool:
        every_s = self.config.checkpoint_every_s
        return every_s > 0 and time.monotonic() >= self._saved_s + every_s

    def _save_checkpoint(self) -> None:
        self.loop.check_losses()  # a rerun must not resume from such weights
        try:
            with self.loop.window(WindowKind.CHECKPOINT):
                path = self.checkpoints.save(self.loop.step, *self._state())
        finally:
            self._saved_s = time.monotonic()
        self._saved, self._saved_step, self._dirty = path, self.loop.step, False

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, values = self.workload.state()
        rng_tensors, rng_values = checkpoint.rng_state()
        state = TrainerState(
            workload=values,
            random=rng_values,
            validation=self.validation,
            resumed=self.resumed,
            losses_not_finite=self.loop.not_finite,
        )
        named = {WORKLOAD + name: tensor for name, tensor in tensors.items()}
        named |= {RNG + name: tensor for name, tensor in rng_tensors.items()}
        return named, msgspec.to_builtins(state)

    def _checkpoint_on_signal(self, signal: Terminated) -> str:
        """Save what is not saved yet and return a note about it. Never raises: the signal is what ended the run."""
        notes = [signal.note]
        try:
            if self._dirty and not signal.at_once:
                with self.stop_signal.saving():
                    self._save_checkpoint()
        except Terminated as second:
            notes.append(second.note)
        except Exception as error:
            self._record_problem(str(error))
            return str(error)
        notes.append(f"resumes from {self._saved.name}" if self._saved else "")
        return "; ".join(filter(None, notes))

    def _resume(self) -> None:
        """Continue from the newest usable checkpoint, if there is one."""
        while (saved := self.checkpoints.load_latest()) is not None:
            state = to_record(saved.values, TrainerState)
            try:
                self.workload.restore(_with_prefix(WORKLOAD, saved.tensors), state.workload)
            except UserError as error:
                # Intact, but of another data stream: batch=auto may have found another size. An older one may fit.
                self.checkpoints.reject(saved.path, str(error))
                continue
            if self.ranks > 1:
                announce(Command.RESTORE, str(saved.path))
            checkpoint.set_rng_state(_with_prefix(RNG, saved.tensors), state.random)
            self.loop.step, self.loop.not_finite = saved.step, state.losses_not_finite
            self._first_step = self._saved_step = saved.step
            self._saved, self.validation = saved.path, state.validation
            event = ResumeEvent(step=saved.step, checkpoint=self._relative(saved.path))
            self.resumed = [*state.resumed, event]
            log.info("resuming from %s, after %d steps", saved.path, saved.step)
            return
        if self.checkpoints.rejected:
            log.warning("no checkpoint can be used: training starts at step 0")

    # --- the manifest ----------------------------------------------------------------------------

    def _record_problem(self, message: str) -> None:
        log.error("%s", message)
        self.problems.append(ResumeEvent(problem=message))
        self._update_manifest()

    def _update_manifest(self, **results: Any) -> None:
        rejected = [
            ResumeEvent(checkpoint=self._relative(path), reason=reason)
            for path, reason in self.checkpoints.rejected.items()
        ]
        self.manifest.update(
            quality=to_record({**results, "validation": list(self.validation)}, Quality),
            resumed=[*self.resumed, *rejected, *self.problems],
        )

    def _relative(self, path: Path) -> str:
        """Return the path from the run directory: it holds after the point was moved."""
        return os.path.relpath(path, self.run_dir)


def read_workload_state(path: Path, bench: BenchConfig) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what `TrainingWorkload.restore` takes. Raises CheckpointError for a checkpoint that cannot be used."""
    saved = checkpoint.read(path, bench)
    return _with_prefix(WORKLOAD, saved.tensors), to_record(saved.values, TrainerState).workload


def _with_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _json_safe(value: dict[str, Any]) -> dict[str, Any]:
    """Return the values as JSON holds them: numbers that are not finite become None."""
    return decode_record(msgspec.json.encode(value), Any)
