"""FID and CLIP score of a model at one guidance; a sweep over workload.guidance gives the curve.

Prompts and the reference set are those of the data: image i is made of text i modulo their number, or of the i-th
caption drawn from data.captions. Its seed is its own, so that neither the batch nor the recipe decides about its noise.
A point that failed is submitted again alone.
"""

from __future__ import annotations

import hashlib
from functools import partial

import torch

from inpaint_bench.core.errors import UnavailableError
from inpaint_bench.core.schema import WindowKind
from inpaint_bench.core.workloads.fid_clip import Config, Result
from inpaint_bench.data.samples import Batch
from inpaint_bench.quality.metrics import Judges

from . import Recorder
from .sd_inference import Inputs, SdInference, StageClock


class FidClip(SdInference):
    config: Config
    uniform_steps = False  # a step makes images and judges them: its rate would mean nothing

    def prepare(self) -> None:
        if not (self.captions or any(self.source.texts)):
            raise UnavailableError("the data has no texts: prompts are those of its metadata, or data.captions")
        counts = {"images": self.config.images, "real": len(self.source)}
        self.judges = Judges(self.config.judges, self.bench.quality, self.device, **counts)

    def samples(self, number: int) -> list[Batch]:
        return [self._samples[index, 0] for index in self.indices(number)]

    def _make_and_judge(self, inputs: Inputs, prompts: list[str]) -> None:
        self.judges.add(self.pipeline(inputs, StageClock(self.device)), prompts)

    def measure(self, recorder: Recorder) -> None:
        for index in range(len(self.source)):
            pixels = torch.from_numpy(self.source.pixels(index).copy()).permute(2, 0, 1)[None]
            self.judges.add_real(pixels.float() / 127.5 - 1)
        texts: list[str] = []
        self.calls_total = self.config.images // self.images_per_step
        with recorder.window(WindowKind.MEASURE):
            for number in range(self.config.images // self.images_per_step):
                prompts = self.prompts(number)
                texts += prompts
                call = recorder.call(partial(self._make_and_judge, self.inputs(number), prompts))
        lines = [f"{caption.id} {caption.caption}" for caption in self.captions] or texts
        recorder.result(
            Result(
                window_id=call.window_id,
                step=call.step,
                **self.settings,
                **self.judges.scores(),
                images=self.config.images,
                real_images=len(self.source),
                reference=f"{self.source.inventory.kind} {self.source.identity[:12]}",
                judges=self.config.judges,
                prompts_sha256=hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest(),
            )
        )


build = FidClip
