"""Latency and rate of making images with Stable Diffusion: prompt to decoded image, by stages.

A call makes one batch of images, and the device is idle before and after it: its time is what one request waits.
Prompts, images, masks and positions are those of the data; tokenizing and drawing the noise are not timed. All recipes
start from the same weights, prompts and noise, so that their images can be compared.
"""

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from inpaint_bench import levers
from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.errors import UnavailableError
from inpaint_bench.core.records import Parity
from inpaint_bench.core.schema import WindowKind
from inpaint_bench.core.stages import stage
from inpaint_bench.core.workloads import fid_clip
from inpaint_bench.core.workloads.sd_inference import Config, Facts, Result
from inpaint_bench.data.captions import draw_captions
from inpaint_bench.data.open import open_source
from inpaint_bench.data.samples import Batch, Samples
from inpaint_bench.models import flops
from inpaint_bench.models.execution import CudaGraph, Execution
from inpaint_bench.models.generation import Generation, Sampler, baseline_execution, initial_noise
from inpaint_bench.models.networks import build_run_networks, network_facts
from inpaint_bench.profiling.profile import free_memory
from inpaint_bench.quality.metrics import MAX_PSNR_DB, Judges

from . import MeasuringWorkload, ProfiledCall, Recorder, parity
from .batch_search import attempt

TEXT, IMAGE, SAMPLING, DECODE = "text_ms", "image_ms", "sampling_ms", "decode_ms"  # stages, as columns of Result


@dataclass(kw_only=True)
class Inputs:
    """A request on the device: what the stages take. N is the batch, with guidance twice that."""

    text: dict[str, Tensor]  # token ids [N, L], latitude and longitude [N]
    image: dict[str, Tensor]  # [B, 3, R, R] and mask [B, 1, R, R]; empty for text-to-image
    noise: Tensor  # [B, 4, r, r]


class StageClock:
    """Marks the boundaries of stages: CUDA events on a GPU, the host's clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []

    def mark(self, stage: str) -> None:
        """Record the end of a stage; the first mark is the beginning."""
        mark: Any = time.perf_counter()
        if self._cuda:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        self._marks.append((stage, mark))

    def read(self) -> dict[str, float]:
        """Return milliseconds by stage, and `total_ms`. The device must be idle."""
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        times = {stage: self._ms(before, after) for (_, before), (stage, after) in pairs}
        return {**times, "total_ms": self._ms(self._marks[0][1], self._marks[-1][1])}

    def _ms(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) if self._cuda else (end - start) * 1e3


class Pipeline:
    """The stages of a generation one after the other, each captured as a CUDA graph or not."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.stages: dict[str, Callable[..., Tensor]] = {
            TEXT: generation.encode_text,
            SAMPLING: generation.sample,
            DECODE: generation.decode,
        }
        if generation.networks.inpaints:
            self.stages[IMAGE] = generation.encode_image

    def capture(self) -> None:
        """Replay every stage as a CUDA graph from its next call but one on."""
        captured = {name: CudaGraph(stage, warmup=1) for name, stage in self.stages.items()}
        self.stages |= captured
        self.generation.execution.graphs = list(captured.values())

    def __call__(self, inputs: Inputs, clock: StageClock) -> Tensor:
        """Return images [B, 3, R, R] in -1..1; the next call may overwrite them."""

        def run(stage: str, **values: Tensor) -> Tensor:
            result = self.stages[stage](**values)
            clock.mark(stage)
            return result

        clock.mark("")
        states = run(TEXT, **inputs.text)
        channels = {"channels": run(IMAGE, **inputs.image)} if inputs.image else {}
        return run(DECODE, latents=run(SAMPLING, noise=inputs.noise, states=states, **channels))


class SdInference(MeasuringWorkload):
    config: Config
    execution: Execution
    uniform_steps = True

    def __init__(self, bench: BenchConfig, device: torch.device) -> None:
        """Build data and networks on `device` and make the first images. Raises UserError, and UnavailableError."""
        start_s = time.monotonic()
        assert isinstance(bench.workload, Config)
        self.bench, self.config, self.device = bench, bench.workload, device
        # As rows of results and the facts name them.
        self.settings: dict[str, Any] = {name: getattr(self.config, name) for name in ("sampler", "guidance")}
        self.settings["sampler_steps"] = self.config.steps
        levers.require(bench, device)
        given, count = bench.data.captions, self.config.num_prompts(bench)
        self.captions = draw_captions(given, count, bench.data.seed) if given else []
        with stage("data"):
            self.source = source = open_source(bench.data, bench.recipe)
        self.networks = networks = build_run_networks(bench, device, source.centre)
        networks.unet.eval().requires_grad_(False)
        if networks.location:
            networks.location.eval().requires_grad_(False)
        self.images_per_step = bench.batch_size
        self.side = bench.data.resolution_px // networks.downscale  # side of the latents
        if networks.guidance_input:
            networks.unet.guidance = self.config.guidance
        self.execution = baseline_execution(bench, device, networks)
        self.pipeline = self._pipeline(self.config.steps)
        self.inpaints = networks.inpaints
        self._samples = Samples(
            source, networks.tokenize, bench.seed, masks=bench.data.masks, full_mask_share=0, pixels=self.inpaints
        )
        # Read once: the requests differ in their noise, and their cost in nothing.
        self._first = [self._samples[index, 0] for index in self.indices(0)]
        self._empty = networks.tokenize([""])
        self.data = source.facts(bench.data.root)
        self.psnr_db: float | None = None
        self._calls = 0
        self.prepare()
        with stage("parity"):
            reference = attempt(lambda: self.images(0), device)[0] if levers.of_recipe(bench) else None
        parameters = networks.parameter_counts()
        parts = flops.count(bench.model, bench.data.resolution_px, networks, decode=True)
        levers.apply(self.execution)
        if self.execution.cuda_graph:
            self.pipeline.capture()
        free_memory(device)  # the peaks of the recipe are not to include the baseline's networks
        first_s = time.monotonic()
        with stage("compilation"):
            for _ in range(2 if self.execution.cuda_graph else 1):  # the second one is captured
                images = self.images(0)
        first_pass_s = time.monotonic() - first_s
        if reference is not None:
            self.psnr_db = psnr_db(reference, images)
            self.parity = Parity(reference="baseline", prediction_rel=parity.relative_error(reference, images))
        elif levers.of_recipe(bench):
            self.parity = Parity(unavailable=f"the baseline ran out of GPU memory, at {self.images_per_step} images")
        self.facts = self._facts(parameters, parts)
        self.facts.compile_s = self.execution.compile_s(first_pass_s)
        self.facts.setup_s = round(time.monotonic() - start_s, 3)

    def prepare(self) -> None:
        """Do what a workload needs besides, before the first images are made."""

    def _facts(self, parameters: dict[str, int], parts: dict[str, int]) -> Facts:
        generation = self.pipeline.generation
        return Facts(
            **self.execution.facts(),
            **network_facts(self.bench, self.networks, parameters, parts),
            flop_per_image=flops.generation(
                parts, evaluations=generation.evaluations, texts=2 if generation.guided else 1, inpaints=self.inpaints
            ),
            task="inpainting" if self.inpaints else "text_to_image",
            **self.settings,
            guidance_input=self.networks.guidance_input,
            evaluations=generation.evaluations,
            psnr_db=self.psnr_db,
            num_images=len(self.source),
        )

    def _pipeline(self, steps: int) -> Pipeline:
        sampler = Sampler(self.config.sampler, self.networks, steps, self.side)
        return Pipeline(Generation(execution=self.execution, sampler=sampler, guidance=self.config.guidance))

    def indices(self, number: int) -> list[int]:
        """Return which images of the data give the prompts, masks and positions of a request."""
        first = number * self.images_per_step
        return [index % len(self.source) for index in range(first, first + self.images_per_step)]

    def prompts(self, number: int) -> list[str]:
        """Return the prompts of a request."""
        texts = [caption.caption for caption in self.captions] or self.source.texts
        first = number * self.images_per_step
        return [texts[index % len(texts)] for index in range(first, first + self.images_per_step)]

    def samples(self, number: int) -> list[Batch]:
        """Return the samples behind a request."""
        return self._first

    def inputs(self, number: int) -> Inputs:
        """Return the request of this number, the same for every recipe."""
        samples = self.samples(number)

        def stacked(name: str) -> Tensor:
            return torch.stack([sample[name] for sample in samples]).to(self.device)

        guided, batch = self.pipeline.generation.guided, self.images_per_step
        tokens = self.networks.tokenize(self.prompts(number)).to(self.device) if self.captions else stacked("tokens")
        degrees = [stacked("latitude"), stacked("longitude")]
        if guided:  # first all without text and position
            tokens = torch.cat([self._empty.expand(batch, -1).to(self.device), tokens])
            degrees = [torch.cat([torch.full_like(values, torch.nan), values]) for values in degrees]
        seeds = [self.bench.seed * 1_000_003 + number * batch + image for image in range(batch)]
        noise = initial_noise(seeds, self.side, self.networks.latent_channels)
        return Inputs(
            text={"tokens": tokens, "latitude": degrees[0], "longitude": degrees[1]},
            image={name: stacked(name) for name in ("image", "mask")} if self.inpaints else {},
            noise=noise.to(self.device),
        )

    def images(self, number: int) -> Tensor:
        """Return the images of a request, on the CPU."""
        return self.pipeline(self.inputs(number), StageClock(self.device)).cpu()

    # --- measuring -------------------------------------------------------------------------------

    def step(self, recorder: Recorder) -> None:
        inputs, clock, images = self.inputs(self._calls), StageClock(self.device), list[Tensor]()
        self._calls += 1
        call = recorder.call(lambda: images.append(self.pipeline(inputs, clock)))
        generation = self.pipeline.generation
        times: dict[str, Any] = {IMAGE: None, **clock.read()}
        recorder.result(
            Result(
                window_id=call.window_id,
                step=call.step,
                **self.settings,
                evaluations=generation.evaluations,
                inpaints=self.inpaints,
                psnr_db=self.psnr_db,
                finite=bool(images[0].isfinite().all()),
                **times,
            )
        )

    def profiled_calls(self) -> Iterator[ProfiledCall]:
        inputs = self.inputs(0)
        name = "CUDA graph replay" if self.execution.cuda_graph else "call"
        yield ProfiledCall(name=name, work=lambda: self.pipeline(inputs, StageClock(self.device)))

    def probe(self) -> Callable[[], object]:
        # All evaluations of the UNet are alike: one step of sampling shows them, if none of it is a CUDA graph.
        pipeline = self.pipeline if self.execution.cuda_graph else self._pipeline(1)
        inputs = self.inputs(0)
        return lambda: pipeline(inputs, StageClock(self.device))

    def close(self) -> None:
        self.source.close()


def psnr_db(reference: Tensor, images: Tensor) -> float:
    """Return the lowest PSNR of any image [B, 3, R, R] in -1..1 against its reference, in dB; at most 100."""
    errors = (images.double() - reference.double()).square().flatten(1).mean(1)
    return min(MAX_PSNR_DB, float((10 * (4 / errors.clamp(min=1e-30)).log10()).min()))


class FidClip(SdInference):
    """FID and CLIP score of a model at one guidance; a sweep over workload.guidance gives the curve.

    Prompts and the reference set are those of the data: image i is made of text i modulo their number, or of the i-th
    caption drawn from data.captions. Its seed is its own, so that neither the batch nor the recipe decides about its
    noise. A point that failed is submitted again alone.
    """

    config: fid_clip.Config
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
            fid_clip.Result(
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


build = SdInference
