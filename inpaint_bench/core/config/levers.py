"""The fields of a recipe, and the levers that they declare.

A lever is one field with one value. A field is all that a lever declares: its name on the command line, its help, its
completion and its entry in Hydra's ConfigStore follow from the field. What a truth value does is said in the comment of
its field; words, and numbers with a name, are described one by one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from inpaint_bench.core.kernels import ATTENTION_LIBRARIES

from .validation import one_of, within

Value = bool | int | str


@dataclass(frozen=True)
class Named:
    """A value of a field: what it does, and its lever's name if that does not follow from the field."""

    description: str | None = ""  # empty: a default, left out of lists; None: the comment of its field says it
    name: str = ""
    needs: str = ""  # what the machine, the data or the rest of the recipe must have


@dataclass(frozen=True, kw_only=True)
class Lever:
    """One switch of a recipe."""

    name: str
    field: str
    value: Value
    description: str | None
    needs: str

    @property
    def listed(self) -> bool:
        """Return whether lists show it: not if it is a default that nobody has to set."""
        return self.description != ""


def words(default: str, values: Mapping[str, Named | str], **declared: Any) -> Any:
    """Declare a word: the default, or one of `values`, which are described. `lever` is the pattern of their names.

    `workload` names the capabilities that a workload must have for it, see CAPABILITIES; `read_back` says whether what
    was read back fits, see `is_active`, and `kernels` what a profile must show, see `profiled_kernels`. `memory`: it
    changes the peak of memory. `checkpoint`: False if a training may go on with another value, or the field without
    which the value says nothing.
    """
    named = {value: text if isinstance(text, Named) else Named(text) for value, text in values.items()}
    named = {default: Named(), **named}
    return field(default=default, metadata={"choices": tuple(named), "levers": named, **declared})


def number(limits: Any, values: Mapping[int, Named] = MappingProxyType({}), **declared: Any) -> Any:
    """Declare a number, as `within` does, of which some values have a name."""
    return field(default=limits.default, metadata={**limits.metadata, "levers": values, **declared})


def switch(**declared: Any) -> Any:
    """Declare a truth value that needs something to have an effect, or of which another value is read back."""
    return field(default=False, metadata=declared)


DIVIDED_WEIGHTS = ("fsdp2", "tensor", "pipeline")  # with these each rank has a part of the weights only
INDUCTOR_GRAPHS = ("reduce-overhead", "max-autotune")  # values of `compile` that make CUDA graphs
STORED_BITS = {"fp8": 8, "nf4": 4}  # bits of a frozen weight, by the value of `linears` or `frozen_storage`


def _is_requested(requested: Any, effective: Any, _: Any) -> bool:
    """Return whether it is the value that was requested, a name with it (NhwcUNet), or a count above zero."""
    if isinstance(requested, str) and isinstance(effective, str):
        return requested.lower() in effective.lower() and "," not in effective
    counted = isinstance(requested, bool | str) and not isinstance(effective, bool)
    return bool(effective > 0 if counted else effective in (requested, [requested]))


def _kernels_of(requested: str, effective: dict[str, int], _: Any) -> bool:
    """Return whether the requested kernels ran. cuDNN leaves wide heads to flash, and the UNet's own code some to math.

    Versions that did not know flash4 counted the VAE's kernels too.
    """
    allowed = {requested, "math", "flash" if requested == "cudnn" else requested}
    others = max((count for name, count in effective.items() if name not in allowed), default=0)
    return effective[requested] > 0 and others <= (0 if "flash4" in effective else effective[requested])


def _stored_bits(requested: str, effective: dict[str, float], facts: Mapping[str, Any]) -> bool:
    """Return whether the size of all layers is that of their bits; earlier versions did not count the weights."""
    bits = effective["weights_mib"] * 2**23 / (effective.get("weights") or facts["parameters"])
    return 0.75 < bits / STORED_BITS[requested] < 1.25 and 0 < effective["layers"] == effective.get(
        "of", effective["layers"]
    )


def _encoded(_: Any, calls: int, facts: Mapping[str, Any]) -> bool:
    return calls == 0 or (calls > 0 and facts.get("encodes_online", 1) > 0)  # only one of two images may be cached


# What a lever may need of a workload, in words. RecipeConfig declares the needs of each lever with its field.
CAPABILITIES = {
    "unet": "the UNet of Stable Diffusion",
    "volumes": "the UNet of volumes",
    "vae": "an encoder of images in its step",
    "optimizer": "an AdamW that updates its weights",
    "backward": "a backward pass",
    "data": "a data loader",
    "ranks": "several processes",
    "one_shape": "a network that is called with one shape",
    "graph": "a step that can be captured in a CUDA graph",
}

_CACHES, _SEVERAL = "data=prepared with prepare.caches=true", "several GPUs"


@dataclass(kw_only=True)
class RecipeConfig:
    """How the workload is executed. The defaults are no lever; if it trains beside a VAE, `earlier_baseline`."""

    name: str = ""  # name of a bundle, see recipe.py; empty: named by its levers
    device: str = one_of("cuda", "cpu", default="cuda")  # where the workload runs
    # autocast
    precision: str = words(
        "bf16",
        {
            "bf16": "autocast to bf16 (the default of a GPU)",
            "fp16": "autocast to fp16 with loss scaling",
            "fp32": Named("no autocast: fp32 everywhere, IEEE (TF32 off)", "fp32"),
        },
        lever="amp_{}",
        memory=True,
    )
    # matmuls and convolutions that stay fp32 may use TF32; pinned either way, PyTorch's own default is mixed
    tf32: bool = switch(read_back=lambda _, effective, __: effective is True or all(effective.values()))
    # PyTorch's own default: convolutions that stay fp32 may use TF32, and matmuls not
    tf32_convolutions: bool = switch(read_back=lambda _, effective, __: effective == {"matmul": False, "conv": True})
    # implementation of the UNet
    unet: str = words(
        "diffusers",
        {"nhwc": Named("the UNet is channels-last with fused kernels", needs="a GPU, 16-bit weights")},
        workload="unet",
        kernels="_(group_norm|layer_norm|geglu|cross_attention)_",
        memory=True,
    )
    # implementation of the VAE's encoder, for images that are encoded in the step
    vae_encoder: str = words(
        "diffusers", {"nhwc": "the VAE's encoder is channels-last with fused kernels"}, workload="vae", memory=True
    )
    # how the frozen networks run: VAE and text encoders
    encoders: str = words(
        "fp32",
        {
            "half": "VAE and text encoders have weights in the type of `precision` and run without autocast, as in "
            "diffusers' scripts"
        },
        lever="encoders_{}",
        workload="vae optimizer",
        read_back=lambda _, effective, facts: (
            {*effective["vae"], *effective.get("text_encoder", []), *effective["outputs"].values()}
            == {facts.get("precision", "bf16")}
        ),
    )
    # implementation of the UNet of volumes
    volume_unet: str = words(
        "default",
        {
            "fused": Named(
                "the UNet of volumes has fused norms, upsampling without atomic additions and padded channels",
                needs="channels_last, on a GPU cudnn_benchmark",
            )
        },
        workload="volumes",
        kernels="_group_norm_",
    )
    # type of the UNet's weights, and what the optimizer keeps of them
    weights: str = words(
        "fp32",
        {
            "fp32": Named(name="weights_fp32"),
            "bf16_master": "bf16 weights and gradients, fp32 master weights and moments in the optimizer",
            "bf16_split": "bf16 weights with exact fp32 masters in two halves, bf16 moments that are rounded "
            "stochastically (elsewhere fp32), 18 bytes per parameter; a fused update",
            "bf16_stochastic": "bf16 weights, gradients and moments; the update is rounded stochastically",
            "half": "all networks in the type of `precision`, without masters: to make images, or beneath LoRA",
        },
        lever="{}",
        workload="unet",
        read_back=lambda requested, effective, facts: (
            effective in ("bf16", "fp16", "torch.bfloat16")
            or (requested == "half" and effective == facts.get("precision"))
        ),
        memory=True,
    )
    # products of the linear layers of the network that is trained or makes images
    linears: str = words(
        "default",
        {
            "fp8": Named(
                "linear layers multiply in FP8, also for their input's gradient; frozen weights are stored so",
                needs="an Ada or Hopper GPU",
            )
        },
        lever="{}",
        workload="unet",
        kernels="_scaled_mm|e4m3",
        memory=True,
    )
    # rank of matrices that are trained beside frozen weights of the UNet (LoRA, by peft); 0: all weights are trained
    lora_rank: int = number(
        within(0, 1024, 0),
        {4: Named("LoRA of rank 4 in the UNet's attention, diffusers' usual choice", "lora", "the extra lora")},
        workload="optimizer",
        read_back=lambda requested, effective, _: effective["rank"] == requested and effective.get("layers", 1) > 0,
        memory=True,
        checkpoint="lora_rank",
    )
    # their product is scaled by alpha / rank; null: by 1
    lora_alpha: float | None = number(within(0.001, 100_000, None), workload="optimizer", checkpoint="lora_rank")
    # layers that get them; attention: queries, keys, values and outputs, as in diffusers' examples
    lora_targets: str = words(
        "attention",
        {
            "transformer": "LoRA also in the projections and feed-forward layers beside attention",
            "all": "LoRA also in the projections, the feed-forward layers and the convolutions",
        },
        needs="lora",
        workload="optimizer",
        memory=True,
        checkpoint="lora_rank",
    )
    # how LoRA stores the frozen weights of a transformer's blocks, which are computed with in 16 bits as before
    frozen_storage: str = words(
        "default",
        {
            "fp8": "frozen weights of FLUX and SD 3.5 are stored as float8_e4m3: half the memory, no FP8 arithmetic",
            "nf4": "frozen weights of FLUX and SD 3.5 are stored in 4 bits (NF4): a quarter of the memory",
        },
        lever="frozen_{}",
        needs="lora",
        workload="optimizer",
        read_back=_stored_bits,
        memory=True,
    )
    # LoRA in the text encoder too, which then runs in every step
    lora_text_encoder: bool = switch(needs="lora", workload="optimizer", memory=True, checkpoint="lora_rank")
    # NHWC weights and inputs of convolutions
    channels_last: bool = switch(read_back=lambda _, share, __: 0.5 < share <= 1)
    cudnn_benchmark: bool = False  # cuDNN measures its algorithms on the first call of each shape and takes the fastest
    # plans that cuDNN measures of each shape
    cudnn_benchmark_limit: int = number(
        within(0, 1_000_000, 10),
        {0: Named("every plan that cuDNN offers; warm-up takes longer", "cudnn_all_plans", "cudnn_benchmark")},
    )
    # kernel of scaled dot product attention; default: PyTorch chooses
    attention: str = words(
        "default",
        {
            "math": "attention as plain matmuls and a softmax",
            "efficient": "PyTorch's memory-efficient attention",
            "flash": "FlashAttention",
            "cudnn": "cuDNN's attention; flash where its backward pass does not support a head dimension",
            "flash4": Named("FlashAttention-4", needs="unet_nhwc, FLUX or SD 3.5; a Hopper GPU, the extra flash4"),
        },
        lever="attn_{}",
        workload="unet",
        read_back=_kernels_of,
        kernels={name: f"^attention {library} " for name, library in ATTENTION_LIBRARIES.items()},
        memory=True,
    )
    # compiler of the UNet and of the VAE encoder
    compile: str = words(
        "none",
        {
            "default": Named("torch.compile of the UNet and of the VAE encoder", "compile"),
            "blocks": "torch.compile of the transformer blocks alone, each kind once: a short compilation",
            "reduce-overhead": "torch.compile with its own CUDA graphs",
            "max-autotune": "torch.compile with tuned kernels and CUDA graphs; compiling SD 1.5 takes over 17 min",
            "max-autotune-no-cudagraphs": Named(
                "torch.compile with tuned kernels, without CUDA graphs", "compile_max-autotune_plain"
            ),
            "tensorrt": Named("Torch-TensorRT behind torch.compile, to make images", needs="the extra tensorrt"),
        },
        workload="one_shape",
        read_back=lambda _, effective, __: effective["graphs"] > 0,
        memory=True,
    )
    # inductor lays out convolutions channels_last, which it does not choose for this UNet by itself; best with
    # channels_last too, else the gradients of the weights are transposed
    force_layout: bool = switch(needs="compile", workload="one_shape")
    # inductor's Triton kernels start while the one before ends (programmatic dependent launch)
    pdl: bool = switch(needs="compile", workload="one_shape")
    cuda_graph: bool = switch(workload="graph", memory=True)  # the whole step, optimizer included, as one CUDA graph
    # AdamW; adamw: one kernel per operation for all tensors
    optimizer: str = words(
        "adamw",
        {
            "adamw_loop": "AdamW, one kernel per tensor and operation",
            "adamw_fused": "AdamW, fused kernels",
            "adamw_8bit": Named(
                "AdamW with 8-bit moments: saves memory, and synchronises with the GPU after every weight",
                needs="the extra adam8bit",
            ),
        },
        lever="{}",
        workload="optimizer",
        read_back=lambda requested, effective, _: (
            [effective["fused"] is True, "8bit" in effective["class"]]
            == [requested == "adamw_fused", requested == "adamw_8bit"]
        ),
        memory=True,
    )
    # activations are computed again in the backward pass: less memory, more time
    grad_checkpoint: bool = switch(workload="unet backward", memory=True)
    # what a transformer's blocks keep nevertheless
    checkpoint_keeps: str = words(
        "nothing",
        {"products": "grad_checkpoint keeps what linear layers and attention return, and computes the rest again"},
        lever="checkpoint_keeps_{}",
        needs="grad_checkpoint, FLUX or SD 3.5",
        workload="unet backward",
        memory=True,
    )
    accumulate: int = number(within(1, 1024, 1), workload="backward")  # micro-batches per step; `batch` is their sum
    # who averages the gradients of several GPUs; default: DistributedDataParallel
    exchange: str = words(
        "default",
        {
            "in_place": "gradients of several GPUs are averaged where they lie, without buckets and copies",
            "peer_copies": Named(
                "copy engines write gradients into the memory of the host's other GPUs during the backward pass, and "
                "every GPU averages them: no kernel of NCCL beside those of the backward pass",
                needs="several GPUs of one node",
            ),
        },
        needs=_SEVERAL,
        workload="ranks backward",
    )
    # size in MB of the buckets in which DistributedDataParallel averages the gradients of several GPUs
    bucket_mb: int = number(
        within(1, 4096, 25),
        workload="ranks backward",
        read_back=lambda requested, effective, _: effective == requested * 2**20,
        checkpoint=False,
    )
    # gradients are views into the buckets: no copies, and memory of one gradient less
    bucket_view: bool = switch(needs=_SEVERAL, workload="ranks backward", checkpoint=False)
    # the graph of a step never changes: DDP need not search it for parameters without a gradient
    static_graph: bool = switch(needs=_SEVERAL, workload="ranks backward", checkpoint=False)
    # type in which gradients travel between GPUs
    compress: str = words(
        "none", {"bf16": "gradients travel between GPUs as bf16"}, needs=_SEVERAL, workload="ranks backward"
    )
    # what each GPU keeps a part of only, to save memory
    sharding: str = words(
        "none",
        {
            "none": Named(name="no_sharding"),
            "zero1": "each GPU keeps and updates a part of the optimizer's state, and sends the others its weights",
            "fsdp2": "each GPU keeps a part of weights, gradients and optimizer state, and gathers what a block needs",
            "tensor": Named(
                "tensor parallelism: each GPU computes a part of every transformer block, which need not fit one GPU; "
                "GPUs exchange activations, so the cost grows with the batch",
                needs="several GPUs of one node",
            ),
            "pipeline": Named(
                "pipeline parallelism: each GPU keeps and computes consecutive transformer blocks; `accumulate` is the "
                "number of micro-batches that are under way together, with 1 the GPUs work in turns",
                needs="several GPUs, FLUX or SD 3.5",
            ),
        },
        lever="{}",
        needs=_SEVERAL,
        workload="ranks backward",
        # a small transformer has much outside of the blocks that tensor divides
        read_back=lambda requested, effective, _: (
            0 < effective["state_mib"] < (1 if requested == "tensor" else 0.9) * effective["state_of_all_mib"]
        ),
        memory=True,
        checkpoint=False,
    )
    ema: bool = switch(workload="optimizer")  # an exponential moving average of the weights, updated in every step
    # processes of the data loader; 0: the training process loads
    num_workers: int = number(within(0, 256, 4), workload="data", checkpoint=False)
    # batches that each loader process prepares ahead
    prefetch_factor: int = number(within(1, 64, 2), workload="data", checkpoint=False)
    # loader puts batches into page-locked memory, for faster copies to the GPU
    pin_memory: bool = switch(workload="data", checkpoint=False)
    # copy batches to the GPU beside the step before
    non_blocking: bool = switch(needs="pin_memory", workload="data", checkpoint=False)
    # copy of prepared data that is read
    format: str = words(
        "files",
        {
            "memmap": "images from one memory-mapped array of decoded pixels",
            "hdf5": "images from one HDF5 file of decoded pixels",
            "webdataset": "images from tar shards",
        },
        lever="{}",
        needs="data=prepared with this format in prepare.formats",
        workload="data",
    )
    # where the data is copied to before the first step
    stage_to: str = words(
        "none",
        {"tmp": "the data is copied to the node's disk", "shm": "the data is copied to the node's shared memory"},
        lever="stage_{}",
        needs="data=prepared",
        workload="data",
        checkpoint=False,
    )
    # moments of the images' latents from the cache
    cache_image: bool = switch(needs=_CACHES, workload="data", read_back=_encoded)
    # masks from a pool of `mask_pool` per image, with the moments of their masked images' latents, from the cache
    cache_masked: bool = switch(needs=_CACHES, workload="data", read_back=_encoded)
    # outputs of the text encoder from the cache, which then runs in no step
    cache_text: bool = switch(needs=_CACHES, workload="data", read_back=lambda _, calls, __: calls == 0)
    # where the caches lie while training
    cache_storage: str = words(
        "disk",
        {"gpu": Named("caches lie on the GPU and are gathered there", "on_gpu")},
        needs=_CACHES,
        workload="data",
        checkpoint=False,
    )
    mask_pool: int = number(within(1, 1024, 8), workload="data")  # masks per image in the pool


_SPECS = {spec.name: spec for spec in fields(RecipeConfig) if spec.name not in ("name", "device")}
FIELDS = tuple(_SPECS)


def capabilities(name: str) -> tuple[str, ...]:
    """Return what a field's levers need of a workload, see CAPABILITIES."""
    return tuple(_SPECS[name].metadata.get("workload", "").split())


def declaring(key: str, value: Any) -> tuple[str, ...]:
    """Return the fields that declare this, see `words`."""
    return tuple(name for name, spec in _SPECS.items() if spec.metadata.get(key) == value)


def is_active(name: str, requested: Any, effective: Any, facts: Mapping[str, Any]) -> bool:
    """Return whether what was read back of a field fits what was requested, beside the facts of the workload."""
    if name not in _SPECS:  # but in another version
        return True
    try:
        return bool(_SPECS[name].metadata.get("read_back", _is_requested)(requested, effective, facts))
    except (ArithmeticError, AttributeError, LookupError, TypeError):  # nothing that this lever reads back
        return False


def profiled_kernels(name: str, value: Any) -> str:
    """Return a pattern of "class library name" of a kernel that a profile on a GPU has if the lever is active."""
    kernels = _SPECS[name].metadata.get("kernels", "") if name in _SPECS else ""
    return str(kernels.get(value, "") if isinstance(kernels, dict) else kernels)


def lever_name(name: str, value: Any) -> str:
    """Return the name of a field's lever: `tf32`, `no_pin_memory`, `num_workers=8`, `attn_flash` ..."""
    metadata = _SPECS[name].metadata
    if own := metadata.get("levers", {}).get(value, Named()).name:
        return str(own)
    if isinstance(value, bool):
        return name if value else f"no_{name}"
    if isinstance(value, str):
        return str(metadata.get("lever") or f"{name}_{{}}").format(value)
    return f"{name}={value}"


_SWITCH: dict[Value, Named] = {True: Named(None), False: Named()}
# Numbers have no lever unless one is named: they are written `num_workers=8`.
_ALL = [
    Lever(
        name=lever_name(spec.name, value),
        field=spec.name,
        value=value,
        description=named.description,
        needs=named.needs or spec.metadata.get("needs", ""),
    )
    for spec in _SPECS.values()
    for value, named in (_SWITCH if isinstance(spec.default, bool) else spec.metadata.get("levers", {})).items()
]
LEVERS = {lever.name: lever for lever in _ALL}
