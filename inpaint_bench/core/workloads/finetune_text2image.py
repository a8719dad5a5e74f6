"""Keys of the workload `finetune_text2image`: those of `finetune_inpaint`, for models without masks."""

from dataclasses import dataclass

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.errors import UserError

from . import finetune_inpaint

BOUNDS = {"loss": finetune_inpaint.BOUNDS["loss"]}


@dataclass(kw_only=True)
class Config(finetune_inpaint.Config):
    """Fine-tuning that draws no masks. `recipe.cache_masked` has nothing to store here."""

    unet_channels = (4,)

    def check(self, bench: BenchConfig) -> None:
        super().check(bench)
        for block, name in (("data", "masks"), ("data", "full_mask_share"), ("recipe", "mask_pool")):
            group = getattr(bench, block)
            if (value := getattr(group, name)) != getattr(type(group), name):
                raise UserError(f"{block}.{name}={value}: workload={self.name} draws no masks")
