"""The samples of the training, and the content of a batch.

A batch, `B` images of `R` x `R` pixels, drawn from `D` distinct texts:

| key | shape | type | meaning |
|---|---|---|---|
| index | B | int64 | index of the image in the source |
| draw | B | int64 | number of the sample in the stream, from 0 |
| latitude, longitude | B | float64 | degrees (float32 is off by up to 0.8 m) |
| tokens | B,L | int64 | text |
| text_id | B | int64 | index into the D distinct texts |
| image | B,3,R,R | float32 | -1..1 |
| mask | B,1,R,R | float32 | 1 = repaint |
| masked_image | B,3,R,R | float32 | image, 0 under the mask |

The last three are missing with `pixels=False`, the last two with `masked=False`.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .masks import make_mask
from .source import Pixels, Source

Batch = dict[str, Tensor]

FULL_MASK = -1  # in `pool`: the mask that repaints everything


class Samples(Dataset[Batch]):
    """Samples by (index, draw).

    A sample's mask is the image's own if it has one; otherwise it depends on seed, index and draw, so that it differs
    from epoch to epoch. `pixels=False` decodes nothing and leaves out image, mask and masked_image.

    With `mask_pool` (masks per image) a sample has `pool`, the number of the image's mask or FULL_MASK.
    `cached(index, pool, text_id)` adds the rows of a cache on disk.
    """

    def __init__(
        self,
        source: Source,
        tokenize: Callable[[list[str]], Tensor],
        seed: int,
        *,
        masks: str,
        full_mask_share: float,
        pixels: bool = True,
        masked: bool = True,
        mask_pool: int | None = None,
        cached: Callable[[int, int, int], Batch] | None = None,
    ) -> None:
        self.source, self.seed, self.pixels, self.masked = source, seed, pixels, masked
        self.mask_pool, self.cached = mask_pool, cached
        self.masks, self.full_mask_share = masks, full_mask_share
        # Sorted, because the order of a set of strings differs from process to process.
        self.distinct_texts = sorted(set(source.texts))  # [D]
        text_id = {text: number for number, text in enumerate(self.distinct_texts)}
        self.tokens = tokenize(self.distinct_texts)  # [D, L], once: loader processes need no tokenizer
        self.text_ids = [text_id[text] for text in source.texts]  # [N]

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: tuple[int, int]) -> Batch:
        index, draw = key
        return self.sample(index, draw, self.source.pixels(index) if self.pixels else None)

    def sample(self, index: int, draw: int, pixels: Pixels | None) -> Batch:
        """Return the sample of an image with pixels [R, R, 3], or without image and masks if they are None."""
        latitude, longitude = self.source.positions[index]
        text_id = self.text_ids[index]
        result = {
            "index": torch.tensor(index, dtype=torch.int64),
            "draw": torch.tensor(draw, dtype=torch.int64),
            "latitude": torch.tensor(latitude, dtype=torch.float64),
            "longitude": torch.tensor(longitude, dtype=torch.float64),
            "tokens": self.tokens[text_id],
            "text_id": torch.tensor(text_id, dtype=torch.int64),
        }
        if self.mask_pool:
            result["pool"] = torch.tensor(self._choose_pool_number(index, draw, self.mask_pool), dtype=torch.int64)
        if self.cached:
            result |= self.cached(index, int(result.get("pool", FULL_MASK)), text_id)
        if pixels is None:
            return result
        # np.array copies: the pixels may be a read-only memory map.
        image = torch.from_numpy(np.array(pixels)).permute(2, 0, 1).to(torch.float32).div_(127.5).sub_(1.0)
        result["image"] = image.contiguous()
        if not self.masked:
            return result
        mask = torch.from_numpy(self.mask(index, draw, image.shape[-1]))[None].float()
        return result | {"mask": mask, "masked_image": image * (mask < 0.5)}

    def _choose_pool_number(self, index: int, draw: int, pool_size: int) -> int:
        """Return the number of the sample's mask in the image's pool, or FULL_MASK."""
        # The generator of `make_mask`, whose first number also decides about the full mask: both agree on each sample.
        random = np.random.Generator(np.random.PCG64(np.random.SeedSequence((self.seed, index, draw))))
        full = random.random() < self.full_mask_share and self.source.own_mask(index) is None
        return FULL_MASK if full else int(random.integers(pool_size))

    def mask(self, index: int, draw: int, side: int) -> npt.NDArray[np.uint8]:
        """Return the mask [side, side] of a sample, 1 = repaint."""
        own_mask = self.source.own_mask(index)
        if own_mask is not None:
            return own_mask
        return make_mask(side, (self.seed, index, draw), kind=self.masks, full_mask_share=self.full_mask_share)
