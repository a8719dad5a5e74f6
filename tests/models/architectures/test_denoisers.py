"""The denoisers: published sizes, the library's rule of shapes, and what their tiles compute."""

import pytest
import torch

from analysis import published
from inpaint_bench.models.architectures import denoisers
from tests.models.live_memory import LiveMemory

SHAPES = published.read("denoiser_predicted_shape.csv").to_dicts()
BATCHES = published.read("denoiser_predicted_batch.csv").to_dicts()
SMALL = (8, 16, 32, 64)


@pytest.mark.parametrize("row", published.read("denoiser_models.csv").to_dicts(), ids=lambda row: row["model"])
def test_parameters_and_layers_are_those_published(row):
    network = denoisers.NETWORKS[row["model"].lower()]().to("meta")
    convolutions = [m for m in network.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.ConvTranspose2d)]
    assert sum(p.numel() for p in network.parameters()) == row["params"]
    assert len(convolutions) == row["conv_layers"]


@pytest.mark.parametrize("row", SHAPES, ids=lambda row: f"{row['step']}-{row['width']}")
def test_branch_calls_and_tiles_of_drunet_are_those_predicted(row):
    plan = denoisers.plan("drunet", "library", 2048, row["width"])
    predicted = row["drunet_branch"], row["drunet_unet_calls"], (row["drunet_tile_h"], row["drunet_tile_w"])
    assert (plan.branch, plan.calls, plan.tile) == predicted


def _peak_mib(model: str, shape: tuple[int, ...]) -> float:
    network = denoisers.NETWORKS[model]().to("meta").eval()
    plan = denoisers.plan(model, "library", *shape[2:])
    with torch.no_grad(), LiveMemory() as memory:
        image = torch.empty(shape, device="meta")
        denoisers.denoise(network, image, 0.1, plan)
    return memory.peak_mib


@pytest.mark.parametrize("row", SHAPES[1::4], ids=lambda row: str(row["width"]))
@pytest.mark.parametrize("model", denoisers.NETWORKS)
def test_live_tensors_over_the_width_are_those_predicted(model, row):
    assert _peak_mib(model, (1, 3, 2048, row["width"])) == pytest.approx(row[f"{model}_peak_mib"], rel=0.04)


@pytest.mark.parametrize("row", BATCHES[::4], ids=lambda row: f"{row['patch']}-{row['batch']}")
@pytest.mark.parametrize("model", denoisers.NETWORKS)
def test_live_tensors_over_the_batch_are_those_predicted(model, row):
    # Predictions are whole MiB.
    predicted = pytest.approx(row[f"{model}_peak_mib"], rel=0.04, abs=0.6)
    assert _peak_mib(model, (row["batch"], 3, row["patch"], row["patch"])) == predicted


@pytest.mark.parametrize(
    ("tiling", "size", "branch"),
    [
        ("library", (64, 96), "direct"),
        ("library", (70, 132), "onesplit4"),
        ("library", (24, 40), "pad"),
        ("off", (70, 132), "pad"),
        ("explicit", (70, 132), "tiles"),
        ("explicit", (200, 71), "tiles"),
    ],
)
def test_every_tiling_of_drunet_gives_an_image_of_the_same_size(tiling, size, branch):
    plan = denoisers.plan("drunet", tiling, *size, tile_px=64, overlap_px=8)
    assert plan.branch == branch
    image = torch.rand(2, 3, *size)
    with torch.no_grad():
        assert denoisers.denoise(denoisers.DRUNet(SMALL).eval(), image, 0.1, plan).shape == image.shape


def test_tiles_that_share_the_field_of_view_compute_what_the_whole_image_does():
    torch.manual_seed(0)
    network, image = denoisers.DnCNN(SMALL).eval(), torch.rand(1, 3, 160, 200)
    plans = [denoisers.plan("dncnn", tiling, 160, 200, tile_px=96, overlap_px=20) for tiling in ("off", "explicit")]
    with torch.no_grad():
        whole, tiled = (denoisers.denoise(network, image, 0.1, plan) for plan in plans)
    assert plans[1].calls > 1
    assert torch.allclose(whole, tiled, atol=1e-5)
