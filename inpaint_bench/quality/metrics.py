"""Figures about restored pictures. One that cannot be had says why; it is never zero.

    {"psnr_hole_db": {"value": 21.3, "n": 16}, "lpips": {"unavailable": "quality.lpips_weights is empty"}}

- `psnr_hole_db`: 10 log10(2^2 / mean squared error over the repainted pixels, all channels), images in -1..1, per
  image, averaged over images; 100 dB at most, which an exact restoration gets. Images with an empty mask do not count.
- `ssim_hole`: the SSIM map (Wang et al. 2004: Gaussian window of 11 px, sigma 1.5; mean over channels) averaged over
  the repainted pixels, per image, averaged over images. A window at the hole's edge also sees what was kept.
- `lpips`: AlexNet, version 0.1, of the whole picture, the lower the better. Kept pixels are equal, so that a smaller
  hole gives a lower figure: compare on the same masks only.
- `fid`: torch-fidelity's Inception of 2015, TensorFlow-compatible resize, restored against original pictures. Fewer
  than 2,049 images are refused: the covariance of 2,048 features would not have full rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from inpaint_bench.core.config import QualityConfig

PSNR_CEILING_DB = 100.0
RANGE = 2.0  # of a picture in -1..1
FID_IMAGES = 2049  # features + 1
INCEPTION_SHA = "6726825d"  # first digits of the file's sha256, which torch-fidelity has in its name
Figures = dict[str, dict[str, Any]]


class Unavailable(Exception):  # noqa: N818
    """Why a figure cannot be had, in a sentence."""


class Judge:
    """Figures over `num_images` pictures that come in batches; none is kept."""

    def __init__(self, quality: QualityConfig, num_images: int, device: torch.device) -> None:
        self.device = device
        self._psnr: list[float] = []
        self._ssim: list[float] = []
        self._lpips: list[float] = []
        self._count = 0
        self._without: dict[str, str] = {}
        self._perceptual = self._if_there("lpips", lambda: load_lpips(quality.lpips_weights).to(device))
        self._fid = self._if_there("fid", lambda: load_fid(quality.inception_weights, num_images).to(device))

    def _if_there(self, name: str, load: Callable[[], Any]) -> Any:
        try:
            return load()
        except Unavailable as why:
            self._without[name] = str(why)
            return None

    @torch.no_grad()
    def add(self, originals: Tensor, restored: Tensor, masks: Tensor) -> None:
        """[B, 3, R, R] and [B, 3, R, R] in -1..1, [B, 1, R, R]. Synchronises with the device."""
        originals, restored = (one.to(self.device).float() for one in (originals, restored))
        hole = masks.to(self.device) > 0.5
        filled = hole.flatten(1).any(dim=1)
        self._psnr += psnr_hole(originals, restored, hole)[filled].tolist()
        self._ssim += ssim_hole(originals, restored, hole)[filled].tolist()
        self._count += len(originals)
        if self._perceptual is not None:
            self._lpips += self._perceptual(originals, restored).flatten().tolist()
        if self._fid is not None:
            self._fid.update(_bytes(originals), real=True)
            self._fid.update(_bytes(restored), real=False)

    def figures(self) -> Figures:
        found = {name: {"unavailable": why} for name, why in self._without.items()}
        return {
            "psnr_hole_db": _mean(self._psnr),
            "ssim_hole": _mean(self._ssim),
            "lpips": found.get("lpips") or _mean(self._lpips),
            "fid": found.get("fid") or self._distance(),
        }

    def _distance(self) -> dict[str, Any]:
        if self._count < FID_IMAGES:
            return {"unavailable": _too_few(self._count)}
        return {"value": float(self._fid.compute()), "n": self._count}


def psnr_hole(originals: Tensor, restored: Tensor, hole: Tensor) -> Tensor:
    """[B, C, R, R], [B, C, R, R] in -1..1 and [B, 1, R, R] bool -> [B] dB; NaN where the hole is empty."""
    return (10 * torch.log10(RANGE**2 / _over(hole, (originals - restored).square()))).clamp(max=PSNR_CEILING_DB)


def ssim_hole(originals: Tensor, restored: Tensor, hole: Tensor) -> Tensor:
    """As `psnr_hole`: [B] in -1..1; R is 6 or more."""
    from torchmetrics.functional.image import structural_similarity_index_measure as ssim

    settings: dict[str, Any] = {"data_range": RANGE, "reduction": "none", "return_full_image": True}
    _, image = ssim(restored, originals, **settings)
    return _over(hole, image)


def _over(hole: Tensor, values: Tensor) -> Tensor:
    """Mean of [B, C, R, R] over channels and over the pixels of [B, 1, R, R] -> [B]."""
    inside = values.mean(dim=1, keepdim=True).masked_fill(~hole, 0).sum(dim=(1, 2, 3))
    return inside / hole.sum(dim=(1, 2, 3))


def _mean(values: list[float]) -> dict[str, Any]:
    if not values:
        return {"unavailable": "no image with a repainted part"}
    return {"value": sum(values) / len(values), "n": len(values)}


def _bytes(images: Tensor) -> Tensor:
    return ((images + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def _too_few(count: int) -> str:
    return f"FID needs {FID_IMAGES:,} images at least, there are {count:,}"


def load_lpips(path: str | None) -> nn.Module:
    """LPIPS with AlexNet. `path`: weights of torchvision's AlexNet, or of a whole `lpips.LPIPS(net="alex")`.

    The linear layers come with the library; torchvision would download the rest. Raises Unavailable.
    """
    weights = _weights("lpips_weights", path)
    try:
        import lpips
    except ImportError as error:
        raise Unavailable(_not_installed("lpips", error)) from None
    net: nn.Module = lpips.LPIPS(net="alex", version="0.1", pnet_rand=True, verbose=False)
    own = net.state_dict()
    # "net.slice2.3.weight" is torchvision's "features.3.weight"
    trunk = {key: "features." + ".".join(key.split(".")[-2:]) for key in own if key.startswith("net.")}
    if set(trunk.values()) <= set(weights):
        weights = own | {key: weights[theirs] for key, theirs in trunk.items()}
    try:
        net.load_state_dict(weights)
    except RuntimeError:
        raise Unavailable(
            f"quality.lpips_weights={path}: neither torchvision's AlexNet nor a whole LPIPS network"
        ) from None
    return net.eval()


def load_fid(path: str | None, num_images: int) -> Any:
    """A metric with `update(images, real)` and `compute()` on uint8 pictures. Raises Unavailable."""
    if num_images < FID_IMAGES:
        raise Unavailable(_too_few(num_images))
    # torch-fidelity unpickles without restrictions: the file is first read with them, and must be the one we know.
    _weights("inception_weights", path)
    assert path is not None
    digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    if not digest.startswith(INCEPTION_SHA):
        raise Unavailable(
            f"quality.inception_weights={path}: sha256 begins with {digest[:8]}, torch-fidelity's file with "
            f"{INCEPTION_SHA}; with other weights FID is not comparable"
        )
    try:
        from torchmetrics.image.fid import FrechetInceptionDistance

        return FrechetInceptionDistance(feature_extractor_weights_path=path, antialias=False)
    except ImportError as error:
        raise Unavailable(_not_installed("torch-fidelity", error)) from None


def _weights(name: str, path: str | None) -> Mapping[str, Tensor]:
    """A state dict. Pickles are read as tensors only. Raises Unavailable naming the key."""
    if not path:
        raise Unavailable(f"quality.{name} is empty: no weight file is given, and none is downloaded")
    if not Path(path).is_file():
        raise Unavailable(f"quality.{name}={path}: no such file")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling damaged bytes raises almost anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise Unavailable(f"quality.{name}={path}: not a file of weights ({reason})") from None
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise Unavailable(f"quality.{name}={path}: not a file of weights (no tensors by name)")
    return found


def _not_installed(name: str, error: ImportError) -> str:
    module = name.replace("-", "_")
    lacks = f"{error.name}, which {name} needs," if error.name and error.name.split(".")[0] != module else name
    return f"{lacks} is not installed: pip install 'inpaint-bench[quality]'"
