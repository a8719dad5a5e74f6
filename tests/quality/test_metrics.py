"""Figures about pictures, and the sentences in their place."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from inpaint_bench.core.config.bench import QualityConfig
from inpaint_bench.core.errors import UnavailableError
from inpaint_bench.quality import grid, metrics
from inpaint_bench.quality.metrics import ImageMetrics, psnr_hole, ssim_hole

from .support import CPU


def pictures(count: int = 4, side: int = 32) -> tuple[Tensor, Tensor]:
    """Pictures, and masks of their lower half."""
    masks = torch.zeros(count, 1, side, side)
    masks[:, :, side // 2 :] = 1
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(0)) * 2 - 1, masks


def judge(originals: Tensor, restored: Tensor, masks: Tensor, quality: QualityConfig) -> dict[str, dict[str, Any]]:
    judging = ImageMetrics(quality, len(originals), CPU)
    judging.add(originals, restored, masks)
    return judging.results()


class TestPSNR:
    def test_counts_only_the_hole(self) -> None:
        images, masks = pictures()
        restored = images + 0.2 * masks
        assert psnr_hole(images, restored, masks > 0.5).tolist() == pytest.approx([20.0] * 4, abs=1e-3)
        outside = restored + 0.5 * (1 - masks)
        assert torch.equal(psnr_hole(images, outside, masks > 0.5), psnr_hole(images, restored, masks > 0.5))

    def test_exact_restoration_has_the_maximum(self) -> None:
        images, masks = pictures()
        assert judge(images, images, masks, QualityConfig())["psnr_hole_db"] == {"value": 100.0, "n": 4}

    def test_images_without_a_hole_are_left_out(self) -> None:
        images, masks = pictures()
        masks[1] = 0
        figures = judge(images, images + 0.2 * masks, masks, QualityConfig())
        assert figures["psnr_hole_db"] == {"value": pytest.approx(20.0, abs=1e-3), "n": 3}
        assert figures["ssim_hole"]["n"] == 3
        none = judge(images, images, torch.zeros_like(masks), QualityConfig())
        assert none["psnr_hole_db"] == {"unavailable": "no image has a repainted part"}


class TestSSIM:
    def test_is_one_for_equal_images_and_falls_with_noise_in_the_hole(self) -> None:
        images, masks = pictures()
        noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(1))
        same, little, much = (
            float(ssim_hole(images, images + share * noise * masks, masks > 0.5).mean()) for share in (0, 0.2, 1)
        )
        assert same == pytest.approx(1, abs=1e-5)
        assert 1 > little > much > 0

    def test_ignores_pixels_far_from_the_hole(self) -> None:
        images, masks = pictures(side=64)
        changed = images.clone()
        changed[:, :, :20] = 0
        assert torch.allclose(ssim_hole(images, changed, masks > 0.5), torch.ones(4), atol=1e-5)

    def test_equals_its_definition_on_flat_images(self) -> None:
        """Without contrast SSIM is the luminance term alone."""
        first, second = torch.full((1, 3, 32, 32), 0.2), torch.full((1, 3, 32, 32), 0.6)
        constant = (0.01 * 2) ** 2
        expected = (2 * 0.2 * 0.6 + constant) / (0.2**2 + 0.6**2 + constant)
        assert float(ssim_hole(first, second, torch.ones(1, 1, 32, 32) > 0)) == pytest.approx(expected, abs=1e-3)


class TestWithoutWeightFiles:
    def test_unavailable_metric_has_a_reason_and_no_value(self, tmp_path: Path) -> None:
        images, masks = pictures()
        figures = judge(images, images, masks, QualityConfig())
        assert figures["lpips"] == {
            "unavailable": "quality.lpips_weights is empty: no weight file is given, and none is downloaded"
        }
        assert figures["fid"] == {"unavailable": "FID needs at least 2,049 images, there are 4"}
        figures = judge(images, images, masks, QualityConfig(lpips_weights=str(tmp_path / "alex.pth")))
        assert figures["lpips"]["unavailable"].endswith("alex.pth: no such file")

    @pytest.mark.parametrize("content", [b"", b"not weights", b"\x80\x04K\x01."])
    def test_damaged_file_is_named(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "alex.pth").write_bytes(content)
        images, masks = pictures()
        figures = judge(images, images, masks, QualityConfig(lpips_weights=str(tmp_path / "alex.pth")))
        assert "alex.pth: not a weight file" in figures["lpips"]["unavailable"]

    def test_pickle_that_would_run_code_is_not_run(self, tmp_path: Path) -> None:
        class Attack:
            def __reduce__(self) -> Any:
                return (Path.touch, (tmp_path / "ran",))

        torch.save({"weight": Attack()}, tmp_path / "weights.pth")
        for load in (metrics.load_lpips, lambda path: metrics.load_fid(path, 5000)):
            with pytest.raises(UnavailableError, match="not a weight file"):
                load(str(tmp_path / "weights.pth"))
        assert not (tmp_path / "ran").exists()

    def test_missing_library_is_named_with_the_command_that_installs_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "lpips", None)
        torch.save({"features.0.weight": torch.zeros(1)}, tmp_path / "alex.pth")
        with pytest.raises(UnavailableError, match=r"lpips is not installed: pip install 'inpaint-bench\[quality\]'"):
            metrics.load_lpips(str(tmp_path / "alex.pth"))

    def test_unknown_inception_weights_are_refused(self, tmp_path: Path) -> None:
        torch.save({"weight": torch.zeros(1)}, tmp_path / "inception.pth")
        with pytest.raises(UnavailableError, match="with other weights FID is not comparable"):
            metrics.load_fid(str(tmp_path / "inception.pth"), 5000)


class FakeLPIPS(nn.Module):
    """Named as the library names its parts: the trunk in slices, numbered as torchvision numbers its layers."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        assert settings["pnet_rand"], "else the library downloads"
        self.net = nn.Module()
        trunk = nn.ModuleDict({"0": nn.Linear(3, 1, bias=False)})
        self.net.add_module("slice1", trunk)
        self._first = (trunk["0"],)  # as a tuple no second owner of the weights
        self.lin0 = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.lin0.weight, 2.0)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        colour = (first - second).abs().mean(dim=(2, 3))
        distance: Tensor = self.lin0(self._first[0](colour))
        return distance


class TestWithWeightFiles:
    @pytest.fixture(autouse=True)
    def library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = ModuleType("lpips")
        module.LPIPS = FakeLPIPS  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "lpips", module)

    @pytest.mark.parametrize("whole", [True, False])
    def test_lpips_accepts_a_whole_network_or_torchvision_alexnet(self, tmp_path: Path, whole: bool) -> None:
        trunk = torch.full((1, 3), 1.0)
        own = {"net.slice1.0.weight": trunk, "lin0.weight": torch.full((1, 1), 2.0)}
        theirs = {"features.0.weight": trunk, "classifier.6.weight": torch.zeros(1)}
        torch.save(own if whole else theirs, tmp_path / "alex.pth")
        images, masks = pictures()
        restored = images + 0.2 * masks  # half the picture, three channels: 2 * 3 * 0.1
        figures = judge(images, restored, masks, QualityConfig(lpips_weights=str(tmp_path / "alex.pth")))
        assert figures["lpips"] == {"value": pytest.approx(0.6, abs=1e-4), "n": 4}

    def test_lpips_refuses_weights_of_another_network(self, tmp_path: Path) -> None:
        torch.save({"conv.weight": torch.zeros(3)}, tmp_path / "alex.pth")
        with pytest.raises(UnavailableError, match="neither torchvision's AlexNet nor a whole LPIPS network"):
            metrics.load_lpips(str(tmp_path / "alex.pth"))


class Means(nn.Module):
    """A feature network small enough to know the answer: the mean of each channel."""

    num_features = 3

    def forward(self, images: Tensor) -> Tensor:
        return images.double().mean(dim=(2, 3))


def test_fid_of_images_as_bytes_is_the_squared_distance_of_means_for_equal_covariances() -> None:
    from torchmetrics.image.fid import FrechetInceptionDistance

    fid = FrechetInceptionDistance(feature=Means())
    # Whole grey levels, so that nothing is rounded: 8 levels brighter in each of three channels.
    levels = torch.randint(0, 200, (2049, 3, 8, 8), generator=torch.Generator().manual_seed(0)) / 127.5 - 1
    for images, real in ((levels, True), (levels + 8 / 127.5, False)):
        fid.update(metrics.to_bytes(images), real=real)
    assert float(fid.compute()) == pytest.approx(3 * 8**2, rel=1e-3)


class TestGrid:
    def test_has_columns_original_masked_and_restored(self, tmp_path: Path) -> None:
        originals, masks = torch.ones(3, 3, 64, 64), torch.zeros(3, 1, 64, 64)
        masks[:, :, 32:] = 1
        restored = -torch.ones(3, 3, 64, 64)
        grid.write(tmp_path / "grid.png", list(zip(originals, masks, restored, strict=True))[:2], ["a", "b", "c"])
        with Image.open(tmp_path / "grid.png") as sheet:
            assert sheet.width == 3 * (64 + grid.GAP_PX) + grid.GAP_PX
            top = grid.TEXT_PX + 8
            columns = [grid.GAP_PX + 30 + number * (64 + grid.GAP_PX) for number in range(3)]
            upper = [sheet.getpixel((x, top + 10)) for x in columns]
            lower = [sheet.getpixel((x, top + 50)) for x in columns]
        assert upper == [(255,) * 3, (255,) * 3, (0,) * 3]
        assert lower == [(255,) * 3, (127,) * 3, (0,) * 3]
