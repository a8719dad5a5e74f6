"""One sample, and what a batch of them holds.

A batch, `B` images of `R` x `R` pixels, drawn from `D` distinct texts:

| key | shape | type | meaning |
|---|---|---|---|
| index | B | int64 | which image of the source |
| draw | B | int64 | how many samples were drawn before this one since the stream's beginning |
| latitude, longitude | B | float64 | degrees (float32 is off by up to 0.8 m) |
| tokens | B,L | int64 | text |
| text_id | B | int64 | which of the D distinct texts |
| image | B,3,R,R | float32 | -1..1 |
| mask | B,1,R,R | float32 | 1 = repaint |
| masked_image | B,3,R,R | float32 | image, 0 under the mask |

The last three only where `Samples` was told to bring pixels.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .masks import make_mask
from .source import Pixels, Source

Batch = dict[str, Tensor]

FULL = -1  # in `pool`: the mask that repaints everything


class Samples(Dataset[Batch]):
    """One sample by (index, draw).

    Its mask is the data's own where there is one; otherwise it depends on seed, index and draw, and is another
    one in each epoch. `pixels=False` decodes nothing and leaves out image, mask and masked_image.

    With `mask_pool` a sample says which of an image's prepared masks hides it: `pool`, FULL for everything.
    `cached(index, pool, text_id)` adds rows of a cache that lies on disk.
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
        mask_pool: int | None = None,
        cached: Callable[[int, int, int], Batch] | None = None,
    ) -> None:
        self.source, self.seed, self.pixels = source, seed, pixels
        self.mask_pool, self.cached = mask_pool, cached
        self.masks, self.full_mask_share = masks, full_mask_share
        self.distinct_texts = sorted(set(source.texts))  # [D]
        place = {text: number for number, text in enumerate(self.distinct_texts)}
        self.tokens = tokenize(self.distinct_texts)  # [D, L] here, once: workers need no tokenizer
        self.text_ids = [place[text] for text in source.texts]  # [N]

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: tuple[int, int]) -> Batch:
        index, draw = key
        return self.sample(index, draw, self.source.pixels(index) if self.pixels else None)

    def sample(self, index: int, draw: int, pixels: Pixels | None) -> Batch:
        """The sample of an image whose pixels [R, R, 3] were read elsewhere."""
        latitude, longitude = self.source.positions[index]
        text = self.text_ids[index]
        result = {
            "index": torch.tensor(index, dtype=torch.int64),
            "draw": torch.tensor(draw, dtype=torch.int64),
            "latitude": torch.tensor(latitude, dtype=torch.float64),
            "longitude": torch.tensor(longitude, dtype=torch.float64),
            "tokens": self.tokens[text],
            "text_id": torch.tensor(text, dtype=torch.int64),
        }
        if self.mask_pool:
            result["pool"] = torch.tensor(self._pool(index, draw, self.mask_pool), dtype=torch.int64)
        if self.cached:
            result |= self.cached(index, int(result.get("pool", FULL)), text)
        if pixels is None:
            return result
        # An own, writable copy.
        image = torch.from_numpy(np.array(pixels)).permute(2, 0, 1).to(torch.float32).div_(127.5).sub_(1.0)
        mask = torch.from_numpy(self.mask(index, draw, image.shape[-1]))[None].float()
        return result | {"image": image.contiguous(), "mask": mask, "masked_image": image * (mask < 0.5)}

    def _pool(self, index: int, draw: int, size: int) -> int:
        random = np.random.Generator(np.random.PCG64(np.random.SeedSequence((self.seed, index, draw))))
        everything = random.random() < self.full_mask_share and self.source.own_mask(index) is None
        return FULL if everything else int(random.integers(size))

    def mask(self, index: int, draw: int, side: int) -> npt.NDArray[np.uint8]:
        """[side, side], 1 = repaint."""
        own = self.source.own_mask(index)
        if own is not None:
            return own
        return make_mask(side, (self.seed, index, draw), kind=self.masks, full_mask_share=self.full_mask_share)
