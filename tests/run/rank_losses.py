"""Train in float64 on the CPU and print the losses: `python -m tests.run.rank_losses RANK STORE STEPS OVERRIDE...`."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from inpaint_bench import levers, workloads
from inpaint_bench.models.parallel.data_parallel import next_command
from inpaint_bench.models.training_step import StepComponents
from inpaint_bench.ranks.group import join_group

from .support import bench


def apply_float64(components: StepComponents) -> None:
    """Compute in float64 throughout, also in the frozen networks. LoRA and micro-batches alone are applied."""
    networks = components.networks
    for lever in levers.of_recipe(components.bench):
        if lever.field.startswith("lora_") or lever.field == "accumulate":
            lever.apply(components)
    for network in (networks.unet, networks.vae, networks.text_encoder, networks.location):
        if network:
            network.double()
    encoder = components.calls["vae_encoder"]
    components.calls["vae_encoder"] = lambda image: encoder(image.double())
    components.dtype = torch.float64


def main() -> None:
    rank, store, steps = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    config = bench(*sys.argv[4:])
    if config.ranks > 1:
        files = dist.FileStore(store, config.ranks)
        join_group(torch.device("cpu"), store=files, rank=rank, world_size=config.ranks)
    levers.apply = apply_float64
    workload = workloads.load(config, torch.device("cpu"))
    for _ in range(steps):
        if rank:
            next_command()
        print(repr(float(workload.step(workload.next_batch()))))
    components = workload.training_step.components
    trained = {id(parameter) for parameter in components.networks.trainable_parameters()}
    held = components.parallel._others if components.parallel else []
    assert all(id(parameter) in trained for parameter in held), "holds parameters that dividing has replaced"
    if config.ranks > 1:
        dist.destroy_process_group()  # else a thread of gloo may abort the process at its end


if __name__ == "__main__":
    main()
