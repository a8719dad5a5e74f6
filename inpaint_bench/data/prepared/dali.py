"""The JPEGs of a prepared dataset decoded by NVIDIA DALI, on the GPU where the recipe runs on one.

Only the decoder changes: which images, in which order, under which masks, is decided by `Samples` and its sampler.
The files are upright RGB of the run's size since `prepare` wrote them, so that nothing is turned, cut or resized here,
and a file that decodes to another shape ends the run. Held-out images still go through Pillow.

On a processor DALI 2.4 gives the pixels of Pillow 13, to the bit, and refuses a file cut short as Pillow does. nvJPEG
rounds in its own way; how far off it is is measured at the end of each run (`levers.inputs.Decode`) and stands in the
manifest. The GPU's path has not run on a card yet.

The loader's processes read files and draw masks, this process decodes, one batch ahead of the step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

if TYPE_CHECKING:
    from inpaint_bench.data.samples import Batch, Samples

    from .source import PreparedSource


def missing() -> str | None:
    """Why DALI cannot be used, in a sentence, or None."""
    try:
        import_module("nvidia.dali.plugin.pytorch")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "nvidia":
            return f"NVIDIA DALI cannot be imported: {error}"
        extra = "pip install 'inpaint-bench[dali]' (for CUDA 13; with CUDA 12: pip install nvidia-dali-cuda120)"
        return f"NVIDIA DALI is not installed: {extra}"
    except (ImportError, OSError, RuntimeError) as error:
        return f"NVIDIA DALI cannot be imported: {error}"
    return None


class Encoded(Dataset[dict[str, Tensor]]):
    """The samples of `samples` with `jpeg`, the bytes of the file, in place of image and masked_image."""

    def __init__(self, samples: Samples, source: PreparedSource) -> None:
        self.samples, self.source = samples, source

    def __getitem__(self, key: tuple[int, int]) -> Batch:
        index, draw = key
        mask = torch.from_numpy(self.samples.mask(index, draw, self.source.resolution_px))[None].float()
        jpeg = torch.frombuffer(bytearray(self.source.jpeg(index)), dtype=torch.uint8)
        return self.samples.sample(index, draw, None) | {"mask": mask, "jpeg": jpeg}


def collate(samples: list[Batch]) -> Batch:
    """`jpeg` of all samples one after another (one tensor: one piece of shared memory), `jpeg_bytes` their sizes."""
    jpegs = [sample.pop("jpeg") for sample in samples]
    batch: Batch = default_collate(samples)
    return batch | {"jpeg": torch.cat(jpegs), "jpeg_bytes": torch.tensor([len(one) for one in jpegs])}


class DaliBatches:
    """Batches as the table in loader.py has them, from those of `collate`.

    image, mask and masked_image lie on `device`. To be made after the loader's processes: they are forks of this one,
    and DALI's threads would not survive that.
    """

    def __init__(
        self, encoded: Iterator[Batch], source: PreparedSource, batch: int, device: torch.device, non_blocking: bool
    ) -> None:
        self.decoder = "mixed" if device.type == "cuda" else "cpu"  # as DALI calls it
        self.device, self.handed_out = device, 0
        self._encoded, self._source, self._non_blocking = encoded, source, non_blocking
        self._shape = (source.resolution_px, source.resolution_px, 3)
        self._ahead: Batch | None = None  # what DALI is decoding
        # A stream of its own: waiting for the pixels must not be waiting for the step before.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pipeline = _pipeline(batch, self.decoder, device.index or 0)

    def __iter__(self) -> DaliBatches:
        return self

    def __next__(self) -> Batch:
        batch = self._ahead or self._submit()
        pixels = self._pixels(batch["index"].tolist())
        self._ahead = self._submit()
        # As in Samples.sample, for the whole batch.
        image = pixels.permute(0, 3, 1, 2).to(torch.float32).div_(127.5).sub_(1.0).contiguous()
        mask = batch["mask"].to(self.device, non_blocking=self._non_blocking)
        self.handed_out += 1
        return batch | {"image": image, "mask": mask, "masked_image": image * (mask < 0.5)}

    def _submit(self) -> Batch:
        """What is left of a batch while DALI's threads decode its images."""
        batch = next(self._encoded)
        jpegs = np.split(batch.pop("jpeg").numpy(), np.cumsum(batch.pop("jpeg_bytes"))[:-1])
        self._pipeline.feed_input("jpeg", jpegs)
        self._pipeline.schedule_run()
        return batch

    def _pixels(self, indices: list[int]) -> Tensor:
        """[B, R, R, 3] uint8 of the oldest batch. Raises RuntimeError naming a file that cannot be decoded."""
        try:
            (decoded,) = self._pipeline.share_outputs()
        except (RuntimeError, ValueError) as error:
            for index in indices:
                self._source.pixels(index)  # Pillow names the file that it cannot read either
            raise RuntimeError(f"DALI cannot decode a batch: {str(error).strip()}") from error
        for index, shape in zip(indices, decoded.shape(), strict=True):
            if tuple(shape) != self._shape:
                raise RuntimeError(f"{self._source.path(index)}: decodes to {list(shape)}, not {list(self._shape)}")
        pixels = self._copy(decoded.as_tensor(), len(indices))
        self._pipeline.release_outputs()
        return pixels

    def _copy(self, decoded: Any, count: int) -> Tensor:
        from nvidia.dali.plugin.pytorch import feed_ndarray

        if self._stream is None:
            return feed_ndarray(decoded, torch.empty(count, *self._shape, dtype=torch.uint8))
        with torch.cuda.stream(self._stream):
            pixels = torch.empty(count, *self._shape, dtype=torch.uint8, device=self.device)
            feed_ndarray(decoded, pixels, cuda_stream=self._stream)
        self._stream.synchronize()
        pixels.record_stream(torch.cuda.current_stream(self.device))
        return pixels


def _pipeline(batch: int, decoder: str, gpu: int) -> Any:
    from nvidia.dali import fn, types
    from nvidia.dali.pipeline import Pipeline

    threads = len(os.sched_getaffinity(0))
    # Of depth 1, as it is fed: by itself DALI would run ahead of what it was given.
    pipeline = Pipeline(batch, threads, gpu if decoder == "mixed" else None, prefetch_queue_depth=1)
    with pipeline:
        jpeg = fn.external_source(name="jpeg", dtype=types.UINT8, ndim=1)
        # As layout.decode does it: not turned by an EXIF tag (`prepare` has done that), the accurate transform.
        exact = {"adjust_orientation": False, "use_fast_idct": False}
        pipeline.set_outputs(fn.decoders.image(jpeg, device=decoder, output_type=types.RGB, **exact))
    pipeline.build()
    return pipeline
