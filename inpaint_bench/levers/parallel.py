"""How several ranks exchange gradients: switches of PyTorch's DistributedDataParallel (models/data_parallel.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .base import Lever, Verification

if TYPE_CHECKING:
    import torch

    from inpaint_bench.core.config import BenchConfig

    from .observe import StepObservation


class _DdpSwitch(Lever):
    """A switch of DDP, which is set when it wraps the UNet."""

    logged: str  # its name in DDP's own log

    def available(self, bench: BenchConfig, device: torch.device) -> str | None:
        return None if bench.ranks > 1 else "it concerns gradients that several GPUs exchange: set gpus too"

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
