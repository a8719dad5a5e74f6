"""Metrics of restored and generated images, and of volumes.

One of restored images that cannot be computed is reported with the reason, never as zero.

    {"psnr_hole_db": {"value": 21.3, "n": 16}, "lpips": {"unavailable": "quality.lpips_weights is empty"}}

- `psnr_hole_db`: 10 log10(2^2 / mean squared error over the repainted pixels, all channels), images in -1..1, per
  image, averaged over images; at most 100 dB, the value of an exact restoration. Images with an empty mask are left
  out.
- `ssim_hole`: the SSIM map (Wang et al. 2004: Gaussian window of 11 px, sigma 1.5; mean over channels) averaged over
  the repainted pixels, per image, averaged over images. A window at the hole's edge also covers kept pixels.
- `lpips`: AlexNet, version 0.1, of the whole image, lower is better. Kept pixels are equal, so that a smaller hole
  gives a lower value: compare on the same masks only.
- `fid`: unavailable, because at most 64 images are restored. Fewer than 2,049 would not give the covariance of its
  2,048 features full rank. The workload fid_clip computes it, with torch-fidelity's Inception of 2015.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inpaint_bench.core.config.bench import QualityConfig
from inpaint_bench.core.errors import UnavailableError, UserError, first_line
from inpaint_bench.core.files import expand_path
from inpaint_bench.models.execution import set_fp32_precision
from inpaint_bench.models.pipeline_folder import check_network, hash_tokenizer, load_tokenizer
from inpaint_bench.models.weights_folder import weights_path

MAX_PSNR_DB = 100.0
DATA_RANGE = 2.0  # images are in -1..1
MIN_FID_IMAGES = 2049  # features + 1
SCALE_WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)  # weights of the scales of MS-SSIM, Wang et al. 2003
WINDOW = 11  # voxels, of MS-SSIM
INCEPTION_SHA256 = "6726825d"  # first digits, part of the file name that torch-fidelity uses


class ImageMetrics:
    """Accumulates the metrics of `num_images` images that come in batches."""

    def __init__(self, quality: QualityConfig, num_images: int, device: torch.device) -> None:
        self.device = device
        self._psnr: list[float] = []
        self._ssim: list[float] = []
        self._lpips: list[float] = []
        self._lpips_network: nn.Module | None = None
        self._unavailable = {"fid": {"unavailable": _too_few(num_images)}}
        # A missing weight file costs its own metric, not the others and not the run.
        try:
            self._lpips_network = load_lpips(quality.lpips_weights).to(device)
        except UnavailableError as error:
            self._unavailable["lpips"] = {"unavailable": str(error)}

    @torch.no_grad()
    def add(self, originals: Tensor, restored: Tensor, masks: Tensor) -> None:
        """Add [B, 3, R, R] and [B, 3, R, R] in -1..1, [B, 1, R, R]. Synchronises with the device."""
        originals, restored = originals.to(self.device).float(), restored.to(self.device).float()
        hole = masks.to(self.device) > 0.5
        has_hole = hole.flatten(1).any(dim=1)
        # Over an empty hole these means are 0 / 0; such images count for the metrics of whole images alone.
        self._psnr += psnr_hole(originals, restored, hole)[has_hole].tolist()
        self._ssim += ssim_hole(originals, restored, hole)[has_hole].tolist()
        if self._lpips_network is not None:
            self._lpips += self._lpips_network(originals, restored).flatten().tolist()

    def results(self) -> dict[str, dict[str, Any]]:
        """Return value and number of images, or the reason, by metric."""
        values = {"psnr_hole_db": self._psnr, "ssim_hole": self._ssim, "lpips": self._lpips}
        return {**{name: _mean(of_images) for name, of_images in values.items()}, **self._unavailable}


def psnr_hole(originals: Tensor, restored: Tensor, hole: Tensor) -> Tensor:
    """[B, C, R, R], [B, C, R, R] in -1..1 and [B, 1, R, R] bool -> [B] dB; NaN if the hole is empty."""
    error = _mean_in_hole(hole, (originals - restored).square())
    return (10 * torch.log10(DATA_RANGE**2 / error)).clamp(max=MAX_PSNR_DB)


def ssim_hole(originals: Tensor, restored: Tensor, hole: Tensor) -> Tensor:
    """[B, C, R, R], [B, C, R, R] in -1..1 and [B, 1, R, R] bool -> [B] in -1..1; R is 6 or more."""
    from torchmetrics.functional.image import structural_similarity_index_measure as ssim

    settings: dict[str, Any] = {"data_range": DATA_RANGE, "reduction": "none", "return_full_image": True}
    _, ssim_map = ssim(restored, originals, **settings)
    return _mean_in_hole(hole, ssim_map)


def _mean_in_hole(hole: Tensor, values: Tensor) -> Tensor:
    """Average [B, C, R, R] over channels and over the pixels of [B, 1, R, R] -> [B]."""
    inside = values.mean(dim=1, keepdim=True).masked_fill(~hole, 0).sum(dim=(1, 2, 3))
    return inside / hole.sum(dim=(1, 2, 3))


def _mean(values: list[float]) -> dict[str, Any]:
    if not values:
        return {"unavailable": "no image has a repainted part"}
    return {"value": sum(values) / len(values), "n": len(values)}


def ms_ssim_scales(sides: tuple[int, int, int]) -> int:
    """Return how many of the five scales fit: the smallest must hold the window."""
    side = min(sides)
    return max(
        (n for n in range(1, 6) if side >= WINDOW << (n - 1) and side // max(1, n - 1) ** 2 >= WINDOW), default=0
    )


@torch.no_grad()
def volume_ms_ssim(volumes: Tensor, reference: Tensor) -> float:
    """Return MS-SSIM of [B, C, D, H, W] in -1..1, mean over the volumes; NaN if the window does not fit.

    Sides below 176 voxels have fewer than five scales, whose weights are scaled to one.
    """
    from torchmetrics.functional.image import multiscale_structural_similarity_index_measure as ms_ssim

    depth, height, width = volumes.shape[2:]
    count = ms_ssim_scales((depth, height, width))
    if not count:
        return float("nan")
    total = sum(SCALE_WEIGHTS[:count])
    weights = tuple(weight / total for weight in SCALE_WEIGHTS[:count])
    values = [
        float(ms_ssim(volume[None].float(), other[None].float(), data_range=DATA_RANGE, betas=weights))
        for volume, other in zip(volumes, reference, strict=True)
    ]
    return sum(values) / len(values)


def pair_ms_ssim(volumes: Tensor) -> float:
    """Return MS-SSIM of two of the volumes, mean over all pairs: the lower, the more they differ from each other."""
    values = [volume_ms_ssim(volumes[[i]], volumes[[j]]) for i in range(len(volumes)) for j in range(i)]
    return sum(values) / len(values)


def mmd(volumes: Tensor, real: Tensor) -> float:
    """Return the squared maximum mean discrepancy between voxels of two sets of N volumes, 0 if equally distributed.

    Gaussian kernel, as wide as the median distance; unbiased, so perhaps below zero (Gretton et al. 2012, lemma 6). Two
    volumes of the same place in both sets are not compared: they may have the same segmentation.
    """
    both, count = torch.cat([volumes, real]).float().flatten(1), len(real)
    squares = torch.stack([(both - one).square().mean(1, dtype=torch.float64) for one in both])
    kernel = torch.exp(-squares / (2 * squares[squares > 0].median()))
    terms = kernel[:count, :count] + kernel[count:, count:] - kernel[:count, count:] - kernel[count:, :count]
    return float((terms.sum() - terms.trace()) / (count * (count - 1)))


def finite(value: float) -> float | None:
    """Return the number, None if it is NaN or infinite."""
    return value if abs(value) < float("inf") else None


def ieee(metric: Callable[..., float], *volumes: Tensor) -> float | None:
    """Return a metric whose own convolutions do not use TF32; None if it is not finite."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    set_fp32_precision(False, False)
    try:
        return finite(metric(*volumes))
    finally:
        set_fp32_precision(*before)


def to_bytes(images: Tensor) -> Tensor:
    """Return images in -1..1 as uint8."""
    return ((images + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def _too_few(count: int) -> str:
    return f"FID needs at least {MIN_FID_IMAGES:,} images, there are {count:,}"


def load_lpips(path: str | None) -> nn.Module:
    """Load LPIPS with AlexNet. `path`: weights of torchvision's AlexNet, or of a whole `lpips.LPIPS(net="alex")`.

    The linear layers come with the library; torchvision would download the rest. Raises UnavailableError.
    """
    file, weights = _load_weights("lpips_weights", path)
    try:
        import lpips
    except ImportError as error:
        raise UnavailableError(_not_installed("lpips", error)) from None
    # pnet_rand: AlexNet starts with random weights, because lpips would otherwise download them.
    network: nn.Module = lpips.LPIPS(net="alex", version="0.1", pnet_rand=True, verbose=False)
    initial = network.state_dict()
    # "net.slice2.3.weight" is torchvision's "features.3.weight"
    torchvision_names = {key: "features." + ".".join(key.split(".")[-2:]) for key in initial if key.startswith("net.")}
    if set(torchvision_names.values()) <= set(weights):
        weights = initial | {key: weights[name] for key, name in torchvision_names.items()}
    try:
        network.load_state_dict(weights)
    except RuntimeError:
        raise UnavailableError(
            f"quality.lpips_weights={file}: neither torchvision's AlexNet nor a whole LPIPS network"
        ) from None
    return network.eval()


def load_fid(path: str | None, num_images: int) -> Any:
    """Load torchmetrics' FID, which takes uint8 images. Raises UnavailableError."""
    if num_images < MIN_FID_IMAGES:
        raise UnavailableError(_too_few(num_images))
    # torch-fidelity unpickles without restrictions: the file is first read with them, and must be the known one.
    file, _ = _load_weights("inception_weights", path)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if not digest.startswith(INCEPTION_SHA256):
        raise UnavailableError(
            f"quality.inception_weights={file}: sha256 begins with {digest[:8]}, that of torch-fidelity's file with "
            f"{INCEPTION_SHA256}; with other weights FID is not comparable"
        )
    try:
        from torchmetrics.image.fid import FrechetInceptionDistance

        return FrechetInceptionDistance(feature_extractor_weights_path=str(file), antialias=False)
    except ImportError as error:
        raise UnavailableError(_not_installed("torch-fidelity", error)) from None


def _load_weights(key: str, path: str | None) -> tuple[Path, Mapping[str, Tensor]]:
    """Return a file and its state dict; pickles are restricted to tensors. Raises UnavailableError."""
    if not path:
        raise UnavailableError(f"quality.{key} is empty: no weight file is given, and none is downloaded")
    file = expand_path(path)
    if not file.is_file():
        raise UnavailableError(f"quality.{key}={file}: no such file")
    try:
        weights = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling damaged bytes raises almost anything
        raise UnavailableError(f"quality.{key}={file}: not a weight file ({first_line(error)})") from None
    if not isinstance(weights, Mapping) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise UnavailableError(f"quality.{key}={file}: not a weight file (no tensors by name)")
    if not all(value.isfinite().all() for value in weights.values()):
        raise UnavailableError(f"quality.{key}={file}: has values that are NaN or infinite")
    return file, weights


def _not_installed(package: str, error: ImportError) -> str:
    return f"{error.name or package} is not installed: pip install 'inpaint-bench[quality]'"


# --- FID and CLIP score of generated images ------------------------------------------------------

# torchmetrics' FID, and the cosine of CLIP's image and text embeddings. Weights are named by path (QualityConfig),
# nothing is downloaded. Images are scaled to 256 px for FID (bicubic, as the NeMo page does) and to CLIP's own size for
# the score.
FID_PX = 256
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # for OpenAI's CLIP
TINY_FEATURES = 16


class Judges:
    """Accumulates reference images, and generated images with their prompts.

    Raises UnavailableError, with every reason, if a weight file is missing or there are too few images.
    """

    def __init__(self, kind: str, quality: QualityConfig, device: torch.device, *, images: int, real: int) -> None:
        self.device = device
        self._cosines: list[Tensor] = []
        if kind == "tiny":
            from torchmetrics.image.fid import FrechetInceptionDistance

            self._fid: Any = FrechetInceptionDistance(feature=_TinyFeatures())
            self._clip, self._tokenize = _tiny_clip()
        else:
            reasons = []
            if real < MIN_FID_IMAGES:
                reasons.append(f"FID needs at least {MIN_FID_IMAGES:,} images in the reference set, there are {real:,}")
            try:
                self._fid = load_fid(quality.inception_weights, images)
            except UnavailableError as error:
                reasons.append(str(error))
            try:
                self._clip, self._tokenize = _load_clip(quality.clip_model)
            except UnavailableError as error:
                reasons.append(str(error))
            if reasons:
                raise UnavailableError("; ".join(reasons))
        self._fid, self._clip = self._fid.to(device), self._clip.to(device).eval()

    @torch.no_grad()
    def add_real(self, images: Tensor) -> None:
        """Add images of the reference set, [B, 3, R, R] in -1..1."""
        self._fid.update(_bytes(images.to(self.device)), real=True)

    @torch.no_grad()
    def add(self, images: Tensor, prompts: Sequence[str]) -> None:
        """Add generated images [B, 3, R, R] in -1..1."""
        images = images.to(self.device)
        self._fid.update(_bytes(images), real=False)
        side = self._clip.config.vision_config.image_size
        pixels = _resized(images, side) * 0.5 + 0.5
        mean, std = (torch.tensor(values, device=self.device)[:, None, None] for values in (CLIP_MEAN, CLIP_STD))
        tokens = self._tokenize(list(prompts)).to(self.device)
        result = self._clip(input_ids=tokens, pixel_values=(pixels - mean) / std)
        self._cosines.append(F.cosine_similarity(result.image_embeds, result.text_embeds).double().cpu())

    def scores(self) -> dict[str, Any]:
        """Return the scores of all images so far, as columns of the workload's results."""
        cosines = torch.cat(self._cosines)
        std = float(cosines.std()) if len(cosines) > 1 else 0.0
        return {"fid": float(self._fid.compute()), "clip_mean": float(cosines.mean()), "clip_std": std}


def _resized(images: Tensor, side: int) -> Tensor:
    if images.shape[-1] == side:
        return images
    return F.interpolate(images.float(), size=(side, side), mode="bicubic", antialias=True).clamp(-1, 1)


def _bytes(images: Tensor) -> Tensor:
    return to_bytes(_resized(images, min(FID_PX, images.shape[-1])))


def _load_clip(path: str | None) -> tuple[Any, Callable[[list[str]], Tensor]]:
    """Load CLIP and its tokenizer from a folder, safetensors only. Raises UnavailableError."""
    if not path:
        raise UnavailableError("quality.clip_model is empty: no folder is given, and none is downloaded")
    folder = weights_path(path)
    from transformers import CLIPModel

    try:
        model, report = CLIPModel.from_pretrained(
            str(folder), local_files_only=True, use_safetensors=True, output_loading_info=True
        )
        check_network(model, "the model", folder, {**report, "unexpected_keys": ()})
        return model, load_tokenizer(folder, model.config.text_config)
    except (OSError, ValueError, RuntimeError, UserError) as error:
        raise UnavailableError(f"quality.clip_model={path}: not a CLIP model ({first_line(error)})") from None


class _TinyFeatures(nn.Module):
    """A seeded random network in place of Inception, for tests: [B, 3, R, R] uint8 -> [B, TINY_FEATURES]."""

    num_features = TINY_FEATURES

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, inputs in (("first", 3), ("second", TINY_FEATURES)):
            weight = torch.randn(TINY_FEATURES, inputs, 3, 3, generator=generator) / (9 * inputs) ** 0.5
            self.register_buffer(name, weight)

    def forward(self, images: Tensor) -> Tensor:
        maps = F.relu(F.conv2d(images.float() / 127.5 - 1, self.first, stride=2))  # type: ignore[arg-type]
        return F.relu(F.conv2d(maps, self.second, stride=2)).mean((2, 3))  # type: ignore[arg-type]


def _tiny_clip() -> tuple[Any, Callable[[list[str]], Tensor]]:
    from transformers import CLIPConfig, CLIPModel

    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"vocab_size": 1000, "bos_token_id": 998, "eos_token_id": 999, "pad_token_id": 999}
    text = {**size, **ids, "max_position_embeddings": 77}
    config = CLIPConfig(text_config=text, vision_config={**size, "image_size": 32, "patch_size": 8}, projection_dim=16)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = CLIPModel(config)
    return model, hash_tokenizer(1000, 77)
