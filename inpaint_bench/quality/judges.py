"""FID and CLIP score of generated images: torchmetrics' FID, cosine of CLIP's image and text embeddings.

Weights are named by path (QualityConfig), nothing is downloaded. Images are scaled to 256 px for FID (bicubic, as the
NeMo page does) and to CLIP's own size for the score.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inpaint_bench.core.config.bench import QualityConfig
from inpaint_bench.core.errors import UnavailableError, UserError, first_line
from inpaint_bench.models.pipeline_folder import check_network
from inpaint_bench.models.tokenizer import hash_tokenizer, load_tokenizer
from inpaint_bench.models.weights_folder import weights_path

from .metrics import MIN_FID_IMAGES, load_fid, to_bytes

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

    def scores(self) -> dict[str, float]:
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
