"""Decode the JPEGs of a prepared dataset with NVIDIA DALI, on the GPU where the recipe runs on one.

Only the decoder changes: `Samples` and its sampler decide which images, in which order, under which masks. The files
are upright RGB of the run's size since `prepare` wrote them, so nothing is rotated, cropped or resized here, and a file
that decodes to another shape ends the run. Held-out images are still decoded by Pillow.

On a CPU, DALI 2.4 gives the pixels of Pillow 13 to the bit, and refuses a truncated file as Pillow does. nvJPEG rounds
differently; the difference is measured at the end of each run (`levers.data_path.Decode`) and is in the manifest.
The GPU path has not run on a card yet.

The loader's processes read files and draw masks; this process decodes, one batch ahead of the step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from inpaint_bench.data.samples import Batch, Samples

from .source import PreparedSource


def unavailable_reason() -> str | None:
    """Return why DALI cannot be used, or None if it can."""
    try:
        import_module("nvidia.dali.plugin.pytorch")
    except (ImportError, OSError, RuntimeError) as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("nvidia"):
            extra = "pip install 'inpaint-bench[dali]' (for CUDA 13; with CUDA 12: pip install nvidia-dali-cuda120)"
            return f"NVIDIA DALI is not installed: {extra}"
        return f"NVIDIA DALI cannot be imported: {error}"
    return None


class EncodedSamples(Dataset[dict[str, Tensor]]):
    """The samples of `samples` with `jpeg`, the bytes of the file, in place of image and masked_image."""

    def __init__(self, samples: Samples, source: PreparedSource) -> None:
        self.samples, self.source = samples, source

    def __getitem__(self, key: tuple[int, int]) -> Batch:
        index, draw = key
        masks: Batch = {}
        if self.samples.masked:
            mask = self.samples.mask(index, draw, self.source.resolution_px)
            masks["mask"] = torch.from_numpy(mask)[None].float()
        # A copy, because frombuffer warns about memory that is read-only, such as bytes.
        jpeg = torch.frombuffer(bytearray(self.source.jpeg(index)), dtype=torch.uint8)
        return self.samples.sample(index, draw, None) | masks | {"jpeg": jpeg}


def collate(samples: list[Batch]) -> Batch:
    """Collate samples: `jpeg` is all files in one tensor (one piece of shared memory), `jpeg_bytes` their sizes."""
    jpegs = [sample.pop("jpeg") for sample in samples]
    batch: Batch = default_collate(samples)
    return batch | {"jpeg": torch.cat(jpegs), "jpeg_bytes": torch.tensor([len(jpeg) for jpeg in jpegs])}


class DaliBatches(Iterator[Batch]):
    """Batches as in the table of samples.py, from those of `collate`; image, mask and masked_image are on `device`.

    Create it after the loader's processes: they are forks of this one, which DALI's threads would not survive.
    """

    def __init__(
        self, encoded: Iterator[Batch], source: PreparedSource, batch: int, device: torch.device, non_blocking: bool
    ) -> None:
        self.decoder = "mixed" if device.type == "cuda" else "cpu"  # DALI's names
        self.device, self.num_batches = device, 0
        self._encoded, self._source, self._non_blocking = encoded, source, non_blocking
        self._shape = (source.resolution_px, source.resolution_px, 3)
        self._next: Batch | None = None  # whose images DALI is decoding
        # A stream of its own: waiting for the pixels must not wait for the previous step.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pipeline = _build_pipeline(batch, self.decoder, device.index or 0)

    def __next__(self) -> Batch:
        batch = self._next or self._submit()
        pixels = self._wait_for_pixels(batch["index"].tolist())
        # The pixels are copied out of DALI's buffer: it can decode the next batch while the step runs on this one.
        self._next = self._submit()
        # As in Samples.sample, for the whole batch.
        image = pixels.permute(0, 3, 1, 2).to(torch.float32).div_(127.5).sub_(1.0).contiguous()
        self.num_batches += 1
        if "mask" not in batch:
            return batch | {"image": image}
        mask = batch["mask"].to(self.device, non_blocking=self._non_blocking)
        return batch | {"image": image, "mask": mask, "masked_image": image * (mask < 0.5)}

    def _submit(self) -> Batch:
        """Start decoding the next batch's images and return the rest of the batch."""
        batch = next(self._encoded)
        jpegs = np.split(batch.pop("jpeg").numpy(), np.cumsum(batch.pop("jpeg_bytes"))[:-1])
        self._pipeline.feed_input("jpeg", jpegs)
        self._pipeline.schedule_run()
        return batch

    def _wait_for_pixels(self, indices: list[int]) -> Tensor:
        """Return [B, R, R, 3] uint8 of the submitted batch. Raises RuntimeError naming an undecodable file."""
        try:
            (decoded,) = self._pipeline.share_outputs()
        except (RuntimeError, ValueError) as error:
            for index in indices:
                self._source.pixels(index)  # Pillow fails on the same file, and names it
            raise RuntimeError(f"DALI cannot decode a batch: {str(error).strip()}") from error
        for index, shape in zip(indices, decoded.shape(), strict=True):
            if tuple(shape) != self._shape:
                raise RuntimeError(f"{self._source.path(index)}: decodes to {list(shape)}, not {list(self._shape)}")
        # Copied before release_outputs, which gives the buffer back to DALI.
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
        # The caching allocator must not reuse this memory before the stream of the step is done with it.
        pixels.record_stream(torch.cuda.current_stream(self.device))
        return pixels


def _build_pipeline(batch: int, decoder: str, gpu: int) -> Any:
    from nvidia.dali import fn, types
    from nvidia.dali.pipeline import Pipeline

    threads = len(os.sched_getaffinity(0))
    # Depth 1, as it is fed: a deeper queue would run ahead of its input.
    pipeline = Pipeline(batch, threads, gpu if decoder == "mixed" else None, prefetch_queue_depth=1)
    with pipeline:
        jpeg = fn.external_source(name="jpeg", dtype=types.UINT8, ndim=1)
        # Like layout.decode_jpeg: no rotation by EXIF (`prepare` has done that), the accurate transform.
        exact = {"adjust_orientation": False, "use_fast_idct": False}
        pipeline.set_outputs(fn.decoders.image(jpeg, device=decoder, output_type=types.RGB, **exact))
    pipeline.build()
    return pipeline
