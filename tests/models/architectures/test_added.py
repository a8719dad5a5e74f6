"""An architecture is one module: this one lies in a folder of the tests, and nothing else knows it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from inpaint_bench import levers
from inpaint_bench.core.errors import UserError
from inpaint_bench.models import architectures, flops
from inpaint_bench.models.networks import build_networks
from inpaint_bench.models.training_step import draw
from inpaint_bench.workloads import finetune_inpaint
from tests.run.support import bench

CPU = torch.device("cpu")
RIPPLE = "+model.transformer={architecture:ripple,in_channels:9,out_channels:4,width:8,cross_attention_dim:32}"


@pytest.fixture
def ripple(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architectures, "__path__", [*architectures.__path__, str(Path(__file__).parent / "added")])


@pytest.mark.usefixtures("ripple")
def test_an_added_architecture_trains_by_its_own_target_order_and_times() -> None:
    point = bench(RIPPLE, "recipe=[cpu,adamw_loop]", "data.resolution_px=64")
    workload = finetune_inpaint.build(point, CPU)
    networks, step = workload.components.networks, workload.training_step
    batch, before = workload.next_batch(), networks.unet.last.weight.clone()
    draws = draw(workload.components, len(batch["image"]), torch.Generator().manual_seed(point.seed))
    with torch.no_grad():
        encoded = [networks.vae.encode(batch[name]).latent_dist for name in ("image", "masked_image")]
        noises = draws.image_noise, draws.masked_noise
        latents, masked = (0.18215 * (e.mean + e.std * noise) for e, noise in zip(encoded, noises, strict=True))
        kept = 1 - F.interpolate(batch["mask"], size=latents.shape[2:])
        alpha = networks.scheduler.alphas_cumprod[500]
        noisy = alpha.sqrt() * latents + (1 - alpha).sqrt() * draws.noise
        texts = networks.text_encoder(batch["tokens"]).last_hidden_state
        assert networks.location
        location = networks.location(batch["latitude"], batch["longitude"], draws.drop_location)
        inputs = torch.cat([noisy, masked, kept], dim=1), draws.timesteps, torch.cat([texts, location], dim=1)
        expected = F.mse_loss(networks.unet(*inputs)[0], latents)
    assert draws.timesteps.tolist() == [500] * len(latents)
    assert float(step(batch)) == pytest.approx(float(expected), rel=1e-6)
    assert not torch.equal(networks.unet.last.weight, before)
    assert not workload.parity.far
    assert all(report.active for report in levers.verify(workload.execution, workload.probe))
    assert networks.parameter_counts()["unet"] == 9 * 9 * 8 + 8 + 32 * 8 + 8 + 9 * 8 * 4 + 4
    side = 8  # latents of 64 pixels
    assert flops.count(point.model, 64, networks)["unet_forward"] == 2 * (9 * side**2 * (9 * 8 + 8 * 4) + 32 * 8)


def test_an_unknown_architecture_is_refused() -> None:
    for name in ("unheard_of", "location"):  # no module, and one that has no architecture
        with pytest.raises(UserError, match=f"transformer.architecture is {name}, which is no model's"):
            build_networks(bench(RIPPLE.replace("ripple", name)).model, CPU)
