"""Does the model use the position? Trains the tiny one on the invented city, then exchanges held-out positions.

usage: python benchmarks/location_used.py OUT [--seeds 4] [--steps 500]      (a processor; 15 minutes on one core)

Everything goes through the commands, with the ordinary validation: whole blocks of ground held out, partial masks,
and text. `gain` is the loss with other images' positions minus that with their own, so above zero the positions
help. For each seed a second model is trained without location (model.location_tokens=0), on the same draws.

One thing comes before: a random VAE makes latents that tell next to nothing of how a house looks, and for the UNet
there would be nothing to learn. So a VAE is trained for a minute on the training images, and frozen.
Intervals over images are too narrow, as neighbours look alike; those over blocks of ground are not.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from torch.utils.data import default_collate

from analysis.stats.intervals import t_quantile
from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.config.parse import parse_config
from inpaint_bench.core.files import read_json
from inpaint_bench.core.hydra_support import register
from inpaint_bench.core.paths import conf_dir
from inpaint_bench.data.open import open_source
from inpaint_bench.data.samples import Samples
from inpaint_bench.data.source import blocks, open_split
from inpaint_bench.models.networks import FROZEN_SEED, build_networks
from inpaint_bench.models.pipeline_folder import save_pipeline
from inpaint_bench.workloads import evaluation

IMAGES, BATCH, RATE = 2304, 32, 2e-3  # 12 x 12 street blocks: 2.4 km x 2.4 km
VAE_STEPS, VAE_BATCH, VAE_RATE, KL = 400, 16, 3e-3, 1e-6
TOKENS = 4

Runs = dict[int, tuple[Path, dict[str, float]]]  # by seed: the attempt, and its last validation


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    began, out = time.monotonic(), options.out.absolute()
    data, start, sweep = out / "facades", out / "start", out / "sweep"
    tiny = ["gpu=cpu", "site=local", "telemetry=none", "model=tiny_inpaint", "data.resolution_px=64"]
    ours = [*tiny, "data=prepared", f"data.root={data}"]

    command("prepare", "data=synthetic", f"data.num_images={IMAGES}", "data.resolution_px=64", f"prepare.out={data}")
    pretrain(bench([*ours, "recipe=cpu"]), start)
    ours.append(f"model.weights={start}")
    command("prepare", *ours, "recipe=cpu", "prepare.caches=true")
    command(
        "launch", "-m", *ours, "recipe=[cpu,cache_image,cache_masked,cache_text]", f"batch={BATCH}",
        f"workload.learning_rate={RATE}", f"workload.train_steps={options.steps}", "workload.warmup_steps=1",
        f"workload.validate_every={options.steps}", f"workload.validation_images={IMAGES}",
        "workload.save_weights=true", f"hydra.sweep.dir={sweep}",
        f"seed={','.join(map(str, range(options.seeds)))}", f"model.location_tokens={TOKENS},0",
    )  # fmt: skip

    with_location: Runs = {}
    without: Runs = {}
    for manifest in (read_json(path) for path in sweep.glob("*/attempt-1/manifest.json")):
        assert manifest is not None
        overrides = dict(one.split("=", 1) for one in manifest["overrides"])
        last = manifest["quality"]["validation"][-1]
        assert last["step"] == options.steps, manifest["message"]
        run = sweep / str(manifest["point"]) / "attempt-1"
        side = without if overrides["model.location_tokens"] == "0" else with_location
        side[int(overrides["seed"])] = run, last
    tell(with_location, without, ours)
    print(f"{options.steps} steps of {BATCH} images, learning rate {RATE:g}; {(time.monotonic() - began) / 60:.1f} min")
    return 0


def tell(with_location: Runs, without: Runs, overrides: list[str]) -> None:
    each: list[np.ndarray] = []
    places: list[str] = []
    print("seed  loss      shuffled  gain      without location")
    for seed, (run, last) in sorted(with_location.items()):
        gains, places = per_image(bench([*overrides, f"model.weights={run / 'weights'}"]))
        loss, shuffled = last["loss"], last["loss_shuffled"]
        assert math.isclose(float(gains.mean()), shuffled - loss, abs_tol=2e-5), "not the run's own validation"
        each.append(gains)
        print(f"{seed:4}  {loss:.5f}   {shuffled:.5f}   {shuffled - loss:+.5f}  {without[seed][1]['loss']:.5f}")
    loss = float(np.mean([last["loss"] for _, last in with_location.values()]))
    gain, names = np.mean(each, axis=0), np.array(places)
    by_block = [float(gain[names == name].mean()) for name in sorted(set(places))]
    missed = [without[seed][1]["loss"] - last["loss"] for seed, (_, last) in with_location.items()]
    print(f"gain over seeds:            {interval([float(one.mean()) for one in each], loss)}")
    print(f"gain over held-out images:  {interval(gain.tolist(), loss)}")
    print(f"gain over held-out blocks:  {interval(by_block, loss)}")
    print(f"trained without, over seeds: {interval(missed, loss)}")
    print(f"helped on {np.mean(gain > 0):.0%} of the images (mean of the seeds' models)")


def per_image(config: BenchConfig) -> tuple[np.ndarray, list[str]]:
    """The gain of every held-out image, [N], and the block of ground it lies in."""
    source = open_source(config.data)
    _, held = open_split(source, config.data)
    nets = build_networks(config.model, torch.device("cpu"))
    samples = Samples(source, nets.tokenize, evaluation.MASK_SEED, masks=config.data.masks, full_mask_share=0.0)
    batches = [
        default_collate([samples[int(index), 0] for index in held[at : at + 8]]) for at in range(0, len(held), 8)
    ]
    shuffled, true = (evaluation.losses(nets, batches, shuffle_positions=shuffle) for shuffle in (True, False))
    return (shuffled - true).numpy(), blocks(source.positions[held], config.data.block_m)


def interval(values: Sequence[float], loss: float) -> str:
    middle = float(np.mean(values))
    half = t_quantile(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return (
        f"{middle:+.5f}, 95 % {middle - half:+.5f} to {middle + half:+.5f}, n = {len(values)}; "
        f"{middle / loss:+.2%} of the loss"
    )


def pretrain(config: BenchConfig, folder: Path) -> None:
    """A pipeline of random networks, but for a VAE trained on the training images, its latents of unit variance."""
    source = open_source(config.data)
    train, _ = open_split(source, config.data)
    torch.manual_seed(FROZEN_SEED)
    latitude, longitude = np.median(source.positions, axis=0).tolist()
    nets = build_networks(config.model, torch.device("cpu"), (latitude, longitude))
    pictures = (
        torch.from_numpy(np.stack([source.pixels(int(index)) for index in train])).permute(0, 3, 1, 2) / 127.5 - 1
    )
    vae = nets.vae.requires_grad_(True).train()
    optimizer = torch.optim.Adam(vae.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, VAE_RATE, VAE_STEPS)
    for _ in range(VAE_STEPS):
        given = pictures[torch.randint(len(pictures), (VAE_BATCH,))]
        latent = vae.encode(given).latent_dist
        wrong = (vae.decode(latent.sample()).sample - given).square().mean()
        (wrong + KL * latent.kl().mean()).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    with torch.no_grad():
        spread = torch.cat([vae.eval().encode(part).latent_dist.mode() for part in pictures.split(64)]).std()
    vae.register_to_config(scaling_factor=1 / float(spread))
    print(f"VAE: {VAE_STEPS} steps, squared error {wrong.item():.4f}, pixels' variance {float(pictures.var()):.4f}")
    save_pipeline(nets, folder)


def bench(overrides: Sequence[str]) -> BenchConfig:
    register()
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        return parse_config(compose("config", overrides=list(overrides)))


def command(*words: str) -> None:
    print("inpaint-bench", *words, flush=True)
    subprocess.run([sys.executable, "-m", "inpaint_bench", *words], check=True)


if __name__ == "__main__":
    sys.exit(main())
