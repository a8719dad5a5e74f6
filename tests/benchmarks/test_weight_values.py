"""The same recipe with other values of the weights: the folders that are written, and what is read of the runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from analysis.dataset import open_dataset
from analysis.merge import merge
from benchmarks.weight_values import UNET, table, write
from inpaint_bench.models.pipeline_folder import save_pipeline
from tests.analysis.build import write_run
from tests.quality.support import loaded, noise, tiny


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    save_pipeline(tiny(), tmp_path / "trained")
    return tmp_path / "trained"


class TestWritten:
    def test_matrices_are_normal_by_their_fan_in_and_the_rest_is_as_trained(
        self, trained: Path, tmp_path: Path
    ) -> None:
        write(trained, tmp_path / "out", "tiny_inpaint")
        before, after = load_file(trained / UNET), load_file(tmp_path / "out/fan_in" / UNET)
        assert after.keys() == before.keys()
        for name, value in after.items():
            assert value.shape == before[name].shape
            if value.ndim < 2:
                assert torch.equal(value, before[name]), name
            elif value.numel() > 5000:
                fan_in = value[0].numel()
                assert float(value.std()) == pytest.approx(fan_in**-0.5, rel=0.05), name
                assert abs(float(value.mean())) < 0.05 * fan_in**-0.5, name
        for part in ("vae", "text_encoder"):
            (file,) = (trained / part).glob("*.safetensors")
            assert (tmp_path / "out/fan_in" / part / file.name).read_bytes() == file.read_bytes()
        assert torch.isfinite(noise(loaded(tmp_path / "out/fan_in"))).all()


class TestShown:
    def test_slowest_weights_are_named(self, tmp_path: Path) -> None:
        for number, (model, steps_per_s) in enumerate((("one", 2.0), ("one_trained", 1.9), ("one_fan_in", 1.95))):
            write_run(tmp_path / "in", f"r-{number}", model=model, steps_per_s=steps_per_s)
        merge([tmp_path / "in"], tmp_path / "ds")
        lines = table(open_dataset(tmp_path / "ds"))
        assert lines[0].endswith("| images/s | J/image | W | SM MHz | n |")
        assert [line.split(" | ")[2] for line in lines[2:5]] == ["one", "one_fan_in", "one_trained"]
        assert lines[-1].endswith("slowest with one_trained, 15.2 images/s, 5.0% below one")
