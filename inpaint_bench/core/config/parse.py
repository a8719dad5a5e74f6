"""From a composed configuration to checked objects."""

import importlib.util
from collections.abc import Collection
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from inpaint_bench.core.errors import UserError

from .bench import NEEDS_ROOT, TRACKER_KEYS, BenchConfig, GpuConfig, TrackConfig
from .doubts import DOUBTS
from .validation import bounds, check, check_field, no_such_choice

# Modules of the extra `train`, by the names with which they are imported.
TRAIN = ("torch", "PIL", "diffusers", "h5py", "torchmetrics", "transformers", "webdataset")


def parse_config(config: DictConfig, *, trains: bool = True) -> BenchConfig:
    """Return a composed configuration as checked objects, without Hydra's own node. Raises UserError."""
    bench = parse_unchecked(config)
    _check_config(bench)
    if trains or "volumes" in bench.workload.capabilities:
        bench.workload.check(bench)
    return bench


def parse_unchecked(config: DictConfig) -> BenchConfig:
    """Return a composed configuration as objects whose values may be out of range."""
    result = OmegaConf.to_object(without_hydra(config))
    assert isinstance(result, BenchConfig)
    return result


def _check_config(bench: BenchConfig) -> None:
    """Raise UserError for values out of range, and for keys that contradict."""
    check(bench)
    for name in bench.silence:
        if name not in DOUBTS:
            raise UserError(no_such_choice(f"silence={name}", DOUBTS))
    # With 0, which means no GPU, the checks of memory and of shares of a peak would be off.
    for name in ("memory_gb", "bandwidth_gb_s", "bf16_dense_tflops", "power_limit_w") if bench.gpu.nvml_name else ():
        high = GpuConfig.__dataclass_fields__[name].metadata["range"][1]
        check_field(f"gpu.{name}", getattr(bench.gpu, name), bounds(1, high))
    if bench.data.kind in NEEDS_ROOT and not bench.data.root:
        raise UserError(f"data.root is empty: data={bench.data.kind} needs data.root=<{NEEDS_ROOT[bench.data.kind]}>")
    if bench.data.kind not in NEEDS_ROOT and bench.data.root:
        others = " or ".join(f"data={kind}" for kind in bench.workload.data_kinds if kind in NEEDS_ROOT)
        right = f"add {others}" if others else "leave data.root out"
        raise UserError(
            f"data.root={bench.data.root}: data={bench.data.kind} makes its data and reads no folder; {right}"
        )
    if bench.data.kind not in (kinds := bench.workload.data_kinds):
        raise UserError(f"data={bench.data.kind}: workload={bench.workload.name} takes {' or '.join(kinds)}")
    if bench.data.captions and not bench.workload.num_prompts(bench):
        raise UserError(
            f"data.captions={bench.data.captions}: workload={bench.workload.name} makes no images of prompts"
        )
    if bench.model.weights and bench.model.text_encoder_2 and not bench.model.transformer:
        raise UserError(
            f"model.weights={bench.model.weights}: weights of {bench.model.name} cannot be loaded; leave it out"
        )
    if bench.data.resolution_px % 8:  # the VAE's downscaling factor
        raise UserError(f"data.resolution_px={bench.data.resolution_px}: must be a multiple of 8")
    if bench.ranks > 1 and "ranks" not in bench.workload.capabilities:
        raise UserError(f"gpus={bench.gpus} nodes={bench.nodes}: workload {bench.workload.name} uses one GPU")
    if bench.ranks > 1 and bench.profiler in ("ncu", "nsys"):
        raise UserError(f"gpus={bench.gpus} nodes={bench.nodes}: profile={bench.profiler} takes one GPU")
    _check_module("workload.module", bench.workload.module)
    if bench.track.module:
        _check_module("track.module", bench.track.module)
    for key, reader in TRACKER_KEYS.items():
        # A tracker of the user's own may read any of them.
        without = {"none", "tensorboard", *TRACKER_KEYS.values()} - {reader}
        if getattr(bench.track, key) and bench.track.name in without:
            raise UserError(f"track.{key} is read by track={reader} only, and this is track={bench.track.name}")


def _check_module(key: str, module: str) -> None:
    # Its package only: to look for a submodule would import it, and torch with it.
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise UserError(
            f"{key}={module}: no such module; install it in this environment, or name its folder in PYTHONPATH"
        )


def require_tracker(track: TrackConfig) -> None:
    """Raise UserError if the library of the tracker is not installed in this environment."""
    if track.package and importlib.util.find_spec(track.package) is None:
        raise UserError(
            f"track={track.name} needs {track.package}, which is not installed: "
            f"pip install 'inpaint-bench[{track.name}]'"
        )


def missing_train() -> str | None:
    """Say which module of the extra `train` this environment lacks, without which no run starts; None if none."""
    return next((needs_train(name) for name in TRAIN if importlib.util.find_spec(name) is None), None)


def needs_train(module: str) -> str:
    """Return the sentence on a module of the extra `train` that is not installed."""
    return f"{module} is not installed: pip install 'inpaint-bench[train]'"


def resolved_values(config: DictConfig, left_out: Collection[str]) -> dict[str, Any]:
    """Return a configuration as plain values, with interpolations resolved, but for some of its top keys.

    Key by key: a copy of the configuration without them would take longer than all the rest.
    """
    values = {str(key): config[key] for key in config if key not in left_out}
    return {
        key: OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        for key, value in values.items()
    }


def without_hydra(config: DictConfig) -> DictConfig:
    """Return `config`, or a copy without the node `hydra`, parts of which can only be resolved inside a job."""
    if "hydra" not in config:
        return config
    copy = config.copy()
    # Hydra's own node is read-only, and struct mode forbids the removal of a key.
    with read_write(copy), open_dict(copy):
        copy.pop("hydra", None)
    return copy
