"""Does the speed depend on the values of the weights? A card at its power limit is faster if fewer bits toggle.

usage: python -m benchmarks.weight_values write TRAINED OUT [--model sd15_inpaint]
       python -m benchmarks.weight_values show DATASET

The same recipe is measured with three kinds of weights: as they are initialised, after training, and normal with a
standard deviation of 1 / sqrt(fan-in), scales and biases as trained. The slowest is the speed to report. `write` takes
the weights of a training and writes two configurations of a model, `MODEL_trained` and `MODEL_fan_in`; h200_validity.sh
has the commands.

The learning rate of 1e-9 keeps the values as they are: at 1e-5 the warm-up and the measured steps would be a training.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inpaint_bench.commands.exit_codes import guarded
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.paths import conf_dir
from inpaint_bench.models.weights_folder import check_weights_folder

if TYPE_CHECKING:  # `write` runs on GPU machines that have no polars
    import polars as pl

    from analysis.dataset import Dataset

UNET = Path("unet") / "diffusion_pytorch_model.safetensors"
SEED = 0
COLUMNS = {"images_per_s": "images/s", "joules_per_image": "J/image", "power_w": "W", "sm_clock_mhz_mean": "SM MHz"}


def write(trained: Path, out: Path, model: str) -> None:
    """Write a pipeline folder with normal weights, and a configuration `model=` of each of the two folders.

    Raises UserError if `trained` is no pipeline folder or `out` exists.
    """
    trained, out = trained.absolute(), out.absolute()
    check_weights_folder(trained, str(trained))
    if not (conf_dir() / "model" / f"{model}.yaml").is_file():
        raise UserError(f"--model {model}: no such file in {conf_dir() / 'model'}")
    if out.exists():
        raise UserError(f"{out} exists; name a new folder")
    shutil.copytree(trained, out / "fan_in")
    save_file(normal_weights(load_file(trained / UNET)), out / "fan_in" / UNET, {"format": "pt"})
    (out / "conf" / "model").mkdir(parents=True)
    for kind, folder in (("trained", trained), ("fan_in", out / "fan_in")):
        text = f"defaults:\n  - {model}\n  - _self_\nname: {model}_{kind}\nweights: {folder}\n"
        (out / "conf" / "model" / f"{model}_{kind}.yaml").write_text(text)


def normal_weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return normal numbers in the place of every matrix and convolution; fan-in: inputs of one output."""
    generator = torch.Generator().manual_seed(SEED)
    drawn = {}
    for name, value in state.items():
        drawn[name] = value
        if value.ndim > 1:
            fan_in = value[0].numel()
            drawn[name] = (torch.randn(value.shape, generator=generator) * fan_in**-0.5).to(value.dtype)
    return drawn


def table(dataset: Dataset) -> list[str]:
    """Return the means per recipe, batch and model as lines of Markdown, and the slowest model of each.

    Raises UserError without valid runs of at least two models.
    """
    runs = dataset.runs.filter("valid").sort("recipe", "batch", "model")
    lines = [f"| recipe | batch | weights | {' | '.join(COLUMNS.values())} | n |", "|---" * (4 + len(COLUMNS)) + "|"]
    verdicts = []
    for (recipe, batch), group in runs.group_by("recipe", "batch", maintain_order=True):
        models = [(str(model), rows) for (model,), rows in group.group_by("model", maintain_order=True)]
        if len(models) < 2:
            raise UserError(
                f"{dataset.folder}: valid runs of {recipe}, batch {batch}, with one model only: {models[0][0]}"
            )
        for model, rows in models:
            cells = [_cell(rows, name) for name in COLUMNS]
            lines.append(f"| {recipe} | {batch} | {model} | {' | '.join(cells)} | {rows.height} |")
        rates = {model: float(rows["images_per_s"].mean()) for model, rows in models}  # type: ignore[arg-type]
        slowest, fastest = min(rates, key=rates.__getitem__), max(rates, key=rates.__getitem__)
        slower = 1 - rates[slowest] / rates[fastest]
        verdicts.append(
            f"{recipe}, batch {batch}: slowest with {slowest}, {rates[slowest]:.4g} images/s, "
            f"{slower:.1%} below {fastest}"
        )
    if not verdicts:
        raise UserError(f"{dataset.folder}: no valid run")
    return [*lines, "", *verdicts]


def _cell(rows: pl.DataFrame, name: str) -> str:
    """Return the mean, with its 95 % interval if there are runs enough."""
    known = rows[name].drop_nulls().to_list()
    if not known:
        return "not known"
    from analysis.stats.intervals import mean_interval

    interval = mean_interval([("one card", value) for value in known], min_df=2)
    text = f"{sum(known) / len(known):.4g}"
    return f"{text} ({interval[0]:.4g} to {interval[1]:.4g})" if interval else text


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    writing = verbs.add_parser("write")
    writing.add_argument("trained", type=Path)
    writing.add_argument("out", type=Path)
    writing.add_argument("--model", default="sd15_inpaint")
    showing = verbs.add_parser("show")
    showing.add_argument("dataset", type=Path)
    options = parser.parse_args(argv)
    if options.verb == "write":
        write(options.trained, options.out, options.model)
    else:
        from analysis.dataset import open_dataset

        print("\n".join(table(open_dataset(options.dataset))))
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
