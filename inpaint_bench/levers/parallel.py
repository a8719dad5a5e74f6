"""How several ranks exchange gradients (models/data_parallel.py), and what each keeps (models/sharding.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inpaint_bench.models.sharding import own_optimizer, state_bytes

from .base import Lever, Verification

if TYPE_CHECKING:
    import torch

    from inpaint_bench.core.config import BenchConfig

    from .observe import StepObservation


class _SeveralRanks(Lever):
    """What several ranks do together, set up when the UNet is wrapped."""

    def available(self, bench: BenchConfig, device: torch.device) -> str | None:
        return None if bench.ranks > 1 else "it concerns what several GPUs exchange: set gpus too"


class _DdpSwitch(_SeveralRanks):
    """A switch of DDP, which is set when it wraps the UNet."""

    logged: str  # its name in DDP's own log

    def verify(self, observed: StepObservation) -> Verification:
        parallel = observed.components.parallel
        assert parallel is not None
        value = parallel.ddp._get_ddp_logging_data().get(self.logged)
        return Verification(value, value == self.expected(observed), f"{self.logged} read from DDP's log")

    def expected(self, observed: StepObservation) -> Any:
        """Return what DDP's log has where the switch is on."""
        return True


class BucketSize(_DdpSwitch):
    """MiB of gradients that are averaged at once. The first bucket is smaller, which is DDP's own choice."""

    field, logged = "bucket_mb", "bucket_cap_bytes"

    def expected(self, observed: StepObservation) -> Any:
        return observed.recipe.bucket_mb * 2**20


class BucketView(_DdpSwitch):
    """Gradients are views into the buckets."""

    field, logged = "bucket_view", "gradient_as_bucket_view"


class StaticGraph(_DdpSwitch):
    """The set of used parameters never changes, nor their order."""

    field, logged = "static_graph", "static_graph"


class Compress(_DdpSwitch):
    """Gradients travel as bf16, which halves their bytes."""

    field, logged = "compress", "comm_hook"

    def available(self, bench: BenchConfig, device: torch.device) -> str | None:
        if reason := super().available(bench, device):
            return reason
        return None if device.type == "cuda" else "PyTorch compresses gradients for NCCL only, which needs GPUs"

    def expected(self, observed: StepObservation) -> Any:
        return "bf16_compress_hook"


class Sharding(_SeveralRanks):
    """The optimizer's state is divided among the ranks. Each updates its part of the weights and sends it."""

    field = "sharding"

    def available(self, bench: BenchConfig, device: torch.device) -> str | None:
        if reason := super().available(bench, device):
            return reason
        recipe = bench.recipe
        if recipe.weights != "fp32":
            return f"weights={recipe.weights} have an AdamW of their own with one state for all, which is not divided"
        if recipe.optimizer == "adamw_8bit":
            return "bitsandbytes nests its state, which ZeroRedundancyOptimizer does not bring together again"
        if recipe.cuda_graph:
            return "the ranks send each other their weights behind the optimizer, which is not captured in a CUDA graph"
        return None

    def verify(self, observed: StepObservation) -> Verification:
        step = observed.step
        own = [own_optimizer(optimizer) for optimizer in step.optimizers]
        kept, every = sum(len(optimizer.state) for optimizer in own), len(step.parameters)
        kept_mib = sum(map(state_bytes, step.optimizers)) / 2**20
        every_mib = 2 * sum(parameter.nbytes for parameter in step.parameters) / 2**20  # two moments as wide as weights
        text = (
            f"{type(step.optimizers[0]).__name__}: rank 0 keeps the state of {kept} of {every} parameters, "
            f"{kept_mib:.1f} of {every_mib:.1f} MiB"
        )
        effective = {"parameters": kept, "state_mib": round(kept_mib, 3), "state_mib_of_all": round(every_mib, 3)}
        return Verification(effective, 0 < kept < every, text)
