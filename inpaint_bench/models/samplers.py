"""Samplers of latent diffusion: diffusers' schedulers over the model's own noise schedule.

All their coefficients are numbers of the host and their timesteps Python integers: a step waits for nothing on the
device, so that a CUDA graph can hold a whole sampling loop.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from diffusers import DPMSolverMultistepScheduler, PNDMScheduler
from torch import Tensor

from .pipeline_folder import ddim_scheduler

SAMPLERS: dict[str, Callable[[Any], Any]] = {
    # Without Runge-Kutta steps PNDM is PLMS (arXiv:2202.09778); one more evaluation than it has steps.
    "plms": partial(PNDMScheduler.from_config, skip_prk_steps=True, set_alpha_to_one=False, steps_offset=1),
    "ddim": ddim_scheduler,
    "dpmpp": partial(
        DPMSolverMultistepScheduler.from_config, algorithm_type="dpmsolver++", solver_order=2, steps_offset=1
    ),
}


class Sampler:
    """One of SAMPLERS with a number of steps, over the noise schedule of `scheduler`."""

    def __init__(self, name: str, scheduler: Any, steps: int) -> None:
        self.steps = steps
        self._scheduler = SAMPLERS[name](scheduler.config)
        self._scheduler.set_timesteps(steps)
        self.timesteps: list[int] = self._scheduler.timesteps.tolist()  # one per evaluation of the UNet

    def run(self, noise: Tensor, predict: Callable[[Tensor, int], Tensor]) -> Tensor:
        """Turn noise [B, 4, r, r] into latents; `predict(latents, number)` gives the noise at `timesteps[number]`."""
        # Forgets the predictions of the image before.
        self._scheduler.set_timesteps(self.steps)
        latents = noise * self._scheduler.init_noise_sigma
        for number, timestep in enumerate(self.timesteps):
            latents = self._scheduler.step(predict(latents, number), timestep, latents, return_dict=False)[0]
        return latents
