"""Metrics of restored images, and of volumes. One that cannot be computed is reported with the reason, never as zero.

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

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from inpaint_bench.core.config.bench import QualityConfig
from inpaint_bench.core.errors import UnavailableError, first_line
from inpaint_bench.core.files import expand_path

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
