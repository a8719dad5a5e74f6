"""Data and weights that a job could not read: refused before anything is queued, where this machine sees them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from inpaint_bench.cli import app
from inpaint_bench.core.errors import UserError
from inpaint_bench.models.weights_folder import check_clip_folder, check_weights_folder, weights_digest, weights_path
from tests.data.support import prepared
from tests.quality.support import listening
from tests.run.support import last_given, photo

HERE = ("gpu=cpu", "recipe=cpu", "model=tiny_inpaint", "telemetry=none", "site=local", "dry_run=true")


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Launch a sweep here, which has to be refused, and return the message."""

    def launch(*overrides: str) -> str:
        folder = tmp_path / "sweep"
        assert app.main(["launch", "-m", *last_given(*HERE, *overrides), "seed=0,1", f"hydra.sweep.dir={folder}"]) == 2
        assert not folder.exists()
        return capsys.readouterr().err

    return launch


class TestData:
    def test_folder_without_images(self, refused, tmp_path: Path) -> None:
        root = tmp_path / "photos"
        assert f"data.root={root}: no such folder" in refused("data=folder", f"data.root={root}")
        root.mkdir()
        assert "no image in this folder" in refused("data=folder", f"data.root={root}")
        (root / "a.nef").touch()
        assert "1 RAW file of a camera" in refused("data=folder", f"data.root={root}")
        photo(root / "a.jpg")
        assert "is a file, not a folder" in refused("data=folder", f"data.root={root / 'a.jpg'}")

    def test_prepared_dataset_and_its_caches(self, refused, tmp_path: Path) -> None:
        assert "no prepared.json" in refused("data=prepared", f"data.root={tmp_path}")
        root = prepared(tmp_path / "set", "data.num_images=8", "data.validation_share=0", "prepare.formats=[files]")
        given = ("data=prepared", f"data.root={root}")
        assert "leave out data.resolution_px" in refused(*given, "data.resolution_px=64")
        assert "was prepared as files; this adds it" in refused(*given, "recipe.format=memmap")
        assert "no cache of the frozen networks" in refused(*given, "recipe.cache_image=true")
        (root / "images" / "000003.jpg").unlink()
        assert "000003.jpg is missing" in refused(*given)

    def test_caches_of_another_model(self, refused, tmp_path: Path) -> None:
        """Regression: three jobs built FLUX before they found that no cache was of its VAE."""
        own = ("model=tiny_flux_fill", "data.resolution_px=64", "data.num_images=8", "recipe=cpu")
        root = prepared(tmp_path / "set", *own, "prepare.caches=true", "prepare.formats=[files]")
        given = (own[0], "data=prepared", f"data.root={root}", "recipe.cache_image=true", "recipe.cache_text=true")
        assert app.main(["launch", "-m", *last_given(*HERE, *given)]) == 0
        bf16 = ("model.dtype=bf16", "recipe=cpu+amp_bf16+half+lora")
        message = refused(*given, *bf16)
        assert "no cache fits model=tiny_flux_fill; the nearest was made with another model.dtype. `prepare" in message
        assert "with another model.vae, model.text_encoder" in refused(*given, "model=tiny_inpaint")
        # Settings that change no weight: the advised command finds the cache, and says so in it.
        scaled = "model.vae.scaling_factor=0.2"
        assert "another model.vae. " in refused(*given, scaled)
        command = ("prepare", *own, scaled, "telemetry=none", "data=prepared", f"data.root={root}")
        assert app.main([*last_given(*command), "data.num_images=null", "prepare.caches=true"]) == 0
        assert app.main(["launch", "-m", *last_given(*HERE, *given, scaled)]) == 0
        (description,) = root.glob("cache/*/cache.json")
        record = json.loads(description.read_text())
        assert record.pop("networks")[0]["dtype"] == "fp32"
        description.write_text(json.dumps(record))  # as earlier versions wrote it: the job will tell
        assert app.main(["launch", "-m", *last_given(*HERE, *given, *bf16)]) == 0

    def test_volumes_without_labels_and_too_few_of_them(self, refused, tmp_path: Path) -> None:
        given = ("workload=volume3d_train", "data=nifti", f"data.root={tmp_path}")
        assert "folder images cannot be read" in refused(*given)
        for name in ("images/a.nii.gz", "labels/b.nii.gz", "labels/a.nii.gz"):
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.touch()
        assert "labels/b has no images/b.nii.gz" in refused(*given)
        (tmp_path / "labels" / "b.nii.gz").unlink()
        assert "this run needs 4 to train on and 2 held out" in refused(*given)


def test_recording_that_cannot_be_played(refused, tmp_path: Path) -> None:
    assert "telemetry.capture=nowhere: no capture 'nowhere'; available: a100" in refused(
        "telemetry=replay", "telemetry.capture=nowhere"
    )
    (file := tmp_path / "a.json.gz").touch()
    assert f"telemetry.capture={file}: {file} is not a readable" in refused(
        "telemetry=replay", f"telemetry.capture={file}"
    )
    assert "gpu.capture=x: no capture 'x'" in refused("telemetry=replay", "gpu.capture=x")


class TestWeights:
    def test_folder_that_is_no_pipeline(self, refused, tmp_path: Path) -> None:
        from inpaint_bench.models.pipeline_folder import save_pipeline

        folder = tmp_path / "weights"
        assert "no such folder" in refused(f"model.weights={folder}")
        save_pipeline(listening(), folder)
        assert app.main(["launch", "-m", *HERE, f"model.weights={folder}"]) == 0
        needed = "data.resolution_px=72: model tiny_inpaint needs a multiple of 16"
        assert needed in refused(f"model.weights={folder}", "data.resolution_px=72")
        (unet,) = (folder / "unet").glob("*.safetensors")
        assert "is a file, and a diffusers folder is needed" in refused(f"model.weights={unet}")
        content = unet.read_bytes()
        unet.write_bytes(content[:-100])
        assert "diffusion_pytorch_model.safetensors is damaged or incomplete" in refused(f"model.weights={folder}")
        unet.write_text("version https://git-lfs.github.com/spec/v1")
        assert "is a Git LFS pointer: run `git lfs pull`" in refused(f"model.weights={folder}")
        unet.rename(unet.with_suffix(".fp16.safetensors"))
        assert "it has diffusion_pytorch_model.fp16.safetensors" in refused(f"model.weights={folder}")
        (folder / "vae" / "config.json").write_text("[")
        assert "vae cannot be loaded (config.json is missing or damaged)" in refused(f"model.weights={folder}")
        (folder / "tokenizer").rename(folder / "other")
        assert "not a diffusers folder, tokenizer missing" in refused(f"model.weights={folder}")

    @pytest.mark.parametrize(
        "place", [(), ("site=delta", "gpu=h200", "recipe=baseline", "sites.delta.account.value=abcd-delta-gpu")]
    )
    def test_id_of_the_hub_gets_the_commands(self, refused, place: tuple[str, ...]) -> None:
        message = refused(*place, "model.weights=stable-diffusion-v1-5/stable-diffusion-inpainting")
        assert "hf download stable-diffusion-v1-5/stable-diffusion-inpainting --local-dir" in message
        assert "--exclude '*.bin' --exclude '*.ckpt' --exclude '*.fp16.*'`" in message  # not one option for all
        assert 'model.weights="$PWD/stable-diffusion-inpainting"' in message

    def test_missing_weights_of_a_metric(self, refused, tmp_path: Path) -> None:
        assert "(No such file or directory)" in refused(f"quality.lpips_weights={tmp_path / 'none.pth'}")
        assert "cannot be read (Is a directory)" in refused(f"quality.lpips_weights={tmp_path}")
        assert "no such folder" in refused(f"quality.clip_model={tmp_path / 'none'}")
        assert "hf download openai/clip-vit-large-patch14" in refused(
            "quality.clip_model=openai/clip-vit-large-patch14"
        )

    def test_folder_that_is_no_clip_model(self, refused, tmp_path: Path) -> None:
        given = f"quality.clip_model={tmp_path / 'clip'}"
        folder = tmp_path / "clip"
        folder.mkdir()
        assert f"{given}: not a CLIP model (no config.json with model_type clip)" in refused(given)
        (folder / "config.json").write_text('{"model_type": "bert"}')
        assert "not a CLIP model (its config.json says model_type bert)" in refused(given)
        (folder / "config.json").write_text('{"model_type": "clip"}')
        assert f"{given}: cannot be loaded (model.safetensors is missing)" in refused(given)
        (folder / "pytorch_model.bin").touch()
        assert "holds pickled weights only" in refused(given)
        save_file({}, folder / "model.safetensors")
        assert "cannot be loaded (of its tokenizer vocab.json or merges.txt is missing)" in refused(given)
        (folder / "tokenizer.json").touch()
        check_clip_folder(str(folder))

    def test_missing_weights_of_a_workload(self, refused, tmp_path: Path) -> None:
        volumes = ("workload=volume3d_sample", "workload.network=tiny")
        weights = tmp_path / "weights.safetensors"
        message = f"workload.weights={weights}: cannot be read (No such file or directory)"
        assert message in refused(*volumes, f"workload.weights={weights}")
        weights.touch()
        assert f"workload.weights={weights}: is no file of weights" in refused(*volumes, f"workload.weights={weights}")
        save_file({}, weights)
        other = (f"workload.weights={weights}", "workload.compared_volumes=2", "workload.other_weights=none")
        assert "workload.other_weights=none: cannot be read" in refused(*volumes, *other)

    @pytest.mark.parametrize(
        ("damage", "reason"),
        [
            (lambda path: os.mkfifo(path), "unet/config.json cannot be read (is not a plain file)"),
            (
                lambda path: path.touch() or os.truncate(path, 3 * 2**30),
                "config.json cannot be read (is larger than",
            ),
            (lambda path: path.write_text("[" * 10_000 + "]" * 10_000), "(config.json is missing or damaged)"),
            (lambda path: path.mkdir(), "(config.json is missing or damaged)"),
        ],
        ids=["pipe", "3 GB", "deep", "folder"],
    )
    def test_configuration_that_cannot_be_read_is_refused_at_once(self, damage, reason, tmp_path: Path) -> None:
        for part in ("unet", "vae", "text_encoder", "tokenizer", "scheduler"):
            (tmp_path / part).mkdir()
        damage(tmp_path / "unet" / "config.json")
        with pytest.raises(UserError, match=re.escape(reason)):
            check_weights_folder(tmp_path, "weights")

    def test_a_pipe_in_place_of_weights_is_not_waited_for(self, tmp_path: Path) -> None:
        (tmp_path / "unet").mkdir()
        os.mkfifo(tmp_path / "unet" / "diffusion_pytorch_model.safetensors")
        (tmp_path / "refs").mkdir()
        os.mkfifo(tmp_path / "refs" / "main")
        assert weights_digest(weights_path(str(tmp_path))) is None

    def test_input_channels_that_a_workload_cannot_take(self, refused, tmp_path: Path) -> None:
        from inpaint_bench.models.pipeline_folder import save_pipeline

        assert "model tiny: unet.in_channels is 4, this workload needs 9" in refused("model=tiny")
        fid = ("workload=fid_clip", "demonstration=true", "workload.images=32", "workload.judges=tiny")
        assert "unet.in_channels is 9, this workload needs 4" in refused(*fid)
        save_pipeline(listening(), tmp_path / "weights")
        saved = ("model=tiny", f"model.weights={tmp_path / 'weights'}")
        assert "unet.in_channels is 9, this workload needs 4" in refused(*fid, *saved)


def test_missing_library_of_a_tracker_is_named_here_and_left_to_the_job_elsewhere(
    refused, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = ("track=wandb", "track.package=no_such_library")
    assert "track=wandb needs no_such_library, which is not installed: pip install" in refused(*missing)
    elsewhere = last_given(*HERE, "site=delta", "gpu=h200", "recipe=baseline", "telemetry=nvml", *missing)
    assert app.main(["launch", "-m", *elsewhere, f"hydra.sweep.dir={tmp_path / 'elsewhere'}"]) == 0
    assert "no_such_library" not in capsys.readouterr().err


def test_paths_of_another_site_are_not_looked_at_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = last_given(*HERE, "site=delta", "gpu=h200", "recipe=baseline", f"hydra.sweep.dir={tmp_path / 'sweep'}")
    paths = ["data=folder", "data.root=/scratch/photos", "model.weights=/scratch/sd"]
    assert app.main(["launch", "-m", *sweep, *paths]) == 0
    said = "data.root=/scratch/photos, model.weights=/scratch/sd: at delta, which this machine does not see"
    assert said in capsys.readouterr().out


def test_validation_of_data_in_one_block_is_refused(refused, tmp_path: Path) -> None:
    root = prepared(tmp_path / "set", "data.num_images=3", "prepare.formats=[files]")
    message = refused("data=prepared", f"data.root={root}", "workload.train_steps=2", "workload.validate_every=1")
    assert (
        "all 3 images lie in one geographic block of data.block_m=200; a smaller one may split them in `pre" in message
    )
