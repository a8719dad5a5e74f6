"""Measure a bare training loop of Stable Diffusion 1.5 for inpainting, in images/s: the yardstick of the plain recipe.

The step computes what examples/text_to_image/train_text_to_image.py of diffusers does with --mixed_precision=bf16: VAE
and text encoder in bf16 without autocast, the UNet in fp32 under autocast, torch.optim.AdamW. It differs in that
- it inpaints: nine input channels, two VAE encodings per image; weights and the 77 tokens of a text are random;
- there is no Accelerate, nothing is logged, `loss.item()` is not read, and Pillow crops and resizes the photographs;
- batches come from 4 loader processes through pinned memory; the script has 0 (`--workers 0`) and pageable memory;
- gradients are clipped only with --max-grad-norm (the script's default is 1), and the learning rate is constant.
"""

import argparse
import itertools
import json
from pathlib import Path
from statistics import fmean, median

import numpy as np
import torch
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from PIL import Image, ImageOps
from torch.utils.data import DataLoader, Dataset
from transformers import CLIPTextConfig, CLIPTextModel

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("photographs", type=Path)
parser.add_argument("--constant", action="store_true", help="one batch in pinned memory in place of the loader")
parser.add_argument("--max-grad-norm", type=float)
for name, default in {"batch": 16, "workers": 4, "warmup": 10, "steps": 60, "side": 512}.items():
    parser.add_argument(f"--{name}", type=int, default=default)


class Files(Dataset):
    def __init__(self, options):
        self.paths, self.side = sorted(options.photographs.rglob("*.jpg")), options.side

    def __getitem__(self, number):
        with Image.open(self.paths[number % len(self.paths)]) as image:
            pixels = np.array(ImageOps.fit(image.convert("RGB"), (self.side, self.side), Image.Resampling.BICUBIC))
        image = torch.from_numpy(pixels).permute(2, 0, 1).float().div_(127.5).sub_(1)
        mask, (top, left) = torch.zeros(1, self.side, self.side), np.random.randint(0, self.side // 2, 2)
        mask[:, top : top + self.side // 2, left : left + self.side // 2] = 1
        return {"image": image, "masked": image * (1 - mask), "mask": mask, "tokens": torch.randint(49408, (77,))}


def main(options):
    if not torch.cuda.is_available():
        parser.error("needs a GPU, and PyTorch finds none here")
    if not next(options.photographs.rglob("*.jpg"), None):
        parser.error(f"{options.photographs}: has no *.jpg")
    torch.manual_seed(0)
    unet = UNet2DConditionModel(in_channels=9, cross_attention_dim=768).cuda().train()  # else diffusers' defaults
    kinds = {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
    vae = AutoencoderKL(block_out_channels=(128, 256, 512, 512), layers_per_block=2, latent_channels=4, **kinds)
    text = CLIPTextModel(CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_attention_heads=12))
    torch.nn.ModuleList([vae, text]).requires_grad_(False).eval().to("cuda", torch.bfloat16)
    scheduler = DDPMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-5)
    data = DataLoader(Files(options), options.batch, sampler=range(10**6), num_workers=options.workers, pin_memory=True)
    batches = itertools.repeat(next(iter(data))) if options.constant else iter(data)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(options.warmup + options.steps + 1)]
    for mark in marks:
        mark.record()
        batch = {name: value.cuda(non_blocking=True) for name, value in next(batches).items()}
        pixels = [batch[name].to(torch.bfloat16) for name in ("image", "masked")]
        latents, masked = (vae.encode(p).latent_dist.sample() * vae.config.scaling_factor for p in pixels)
        noise, times = torch.randn_like(latents), torch.randint(1000, (len(latents),), device="cuda")
        mask = torch.nn.functional.interpolate(batch["mask"].to(torch.bfloat16), size=latents.shape[2:])
        inputs = torch.cat([scheduler.add_noise(latents, noise, times), mask, masked], dim=1)
        states = text(batch["tokens"], return_dict=False)[0]
        with torch.autocast("cuda", torch.bfloat16):
            predicted = unet(inputs, times, states, return_dict=False)[0]
        torch.nn.functional.mse_loss(predicted.float(), noise.float()).backward()
        if options.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(unet.parameters(), options.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(marks[options.warmup :])]
    row = {"images_per_s": 1000 * options.batch / fmean(times), "median_ms": median(times), "max_ms": max(times)}
    print(json.dumps(row | {"gpu": torch.cuda.get_device_name()} | vars(options), default=str), flush=True)


if __name__ == "__main__":
    main(parser.parse_args())
