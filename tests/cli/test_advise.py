"""`advise` names site, card, batch and recipe, with an interval and a source; or what would make it feasible."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from inpaint_bench import launch
from inpaint_bench.cli import app
from inpaint_bench.core.estimates import rates
from inpaint_bench.core.paths import ROOT

WISHES = ["model=sd15_inpaint", "images=6500", "epochs=16"]


def advise(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert app.main(["advise", *arguments]) == code
    return capsys.readouterr().out


def test_three_options_keep_to_the_limits(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(advise(capsys, *WISHES, "deadline_h=4", "budget_su=20", "--json"))
    options = found["options"]
    assert list(options) == ["fastest", "cheapest", "least energy"]
    for option in options.values():
        assert option["hours"][1] < option["hours"][0] < option["hours"][2]
        assert option["hours"][0] <= 4
        assert option["service_units"][0] <= 20
        assert option["source"].startswith(("measured (n = ", "ratio of the poster"))
    assert options["fastest"]["hours"][0] == min(option["hours"][0] for option in options.values())
    assert options["least energy"]["joules"][0] == min(
        option["joules"][0] for option in options.values() if option["joules"]
    )
    # 104,000 images at the rate that was measured.
    best = options["least energy"]
    cell = rates.Work("finetune_inpaint", "sd15_inpaint", "", best["recipe"], 512)
    rate = rates.find(cell, best["gpu"], best["batch"], rates.committed(), gpus=best["gpus"])
    assert rate
    assert best["joules"][0] == pytest.approx(104_000 * rate.joules_per_image)
    assert best["hours"][0] * 3600 == pytest.approx(104_000 / rate.images_per_s + rate.other_s)


def test_options_that_the_intervals_do_not_tell_apart_are_called_a_tie(capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: Delta's A40 was the fastest and the cheapest, though GRACE's has the same hours."""
    wishes = [*WISHES, "gpu=a40", "recipe=poster_baseline", "batch=16"]
    tie = "    fastest, cheapest, published: a tie with a40 at grace, recipe poster_baseline, batch 16\n"
    assert tie in advise(capsys, *wishes)
    found = json.loads(advise(capsys, *wishes, "--json"))
    assert [option["site"] for option in found["tied"]["fastest"]] == ["grace"]
    assert "a tie" not in advise(capsys, *wishes, "site=delta")


@pytest.mark.parametrize(
    ("gpu", "batch", "hours"),
    [("a40", 4, 4.12), ("a40", 8, 3.5), ("a40", 16, 3.13), ("a100", 4, 2.57), ("a100", 16, 1.84)],
)
def test_command_of_the_poster_takes_the_hours_of_the_poster(
    gpu: str, batch: int, hours: float, capsys: pytest.CaptureFixture[str]
) -> None:
    wishes = [*WISHES, f"gpu={gpu}", f"batch={batch}", "recipe=poster_baseline"]
    for option in json.loads(advise(capsys, *wishes, "--json"))["options"].values():
        assert option["hours"][0] == pytest.approx(hours, abs=0.001)
        assert option["source"] == "published by the poster"
    text = advise(capsys, *wishes)
    assert f"{hours:.3g} (" in text
    assert text.count("published by the poster") == 1  # though it is the fastest and the cheapest too


def test_card_that_was_not_measured_has_the_ratio_of_the_poster_and_its_own_published_hours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = advise(capsys, *WISHES, "gpu=a40")
    assert "ratio of the poster, 0.227 (0.227 to 0.274), times H200 (" in text
    published = text.partition("\npublished:\n")[2]
    assert "recipe poster_baseline, batch 16" in published.splitlines()[0]
    assert published.splitlines()[1].strip().startswith("3.13 (")
    assert "measured (" not in text


def test_a100_of_the_nemo_page_has_80_gb(capsys: pytest.CaptureFixture[str]) -> None:
    wishes = ["model=sd2", "images=6500", "epochs=16", "site=local"]
    assert "ratio of the NeMo page, 0.524 (0.524 to 0.613), times H100" in advise(capsys, *wishes, "gpu=a100_80gb")
    assert app.main(["advise", *wishes, "gpu=a100"]) == 2


def test_amounts_below_1_have_a_smaller_unit(capsys: pytest.CaptureFixture[str]) -> None:
    text = advise(capsys, *WISHES, "gpu=h200", "recipe=tuned_hopper", "batch=64")
    takes = next(line.split(", ") for line in text.splitlines() if " SU" in line)
    assert takes[0].endswith(" min")
    assert takes[-1].endswith(" kJ")
    assert float(takes[0].split()[0]) > 1
    assert text.startswith("fastest, cheapest in GPU-h, least energy:\n")  # one option is printed once


def test_model_that_was_measured_with_no_bundle_alone_has_options_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert "recipe tuned_dit+" in advise(capsys, "model=flux_fill", "images=6500", "epochs=4", "gpu=h200")


def test_recipes_that_train_adapters_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    text = advise(capsys, "model=flux_fill", "images=6500", "epochs=16", "gpu=h200", "recipe=tuned_dit+fp8+attn_flash4")
    assert "recipe tuned_dit+fp8+attn_flash4 (adapters), batch " in text
    assert "(adapters)" not in advise(capsys, *WISHES)


def test_command_can_be_pasted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (option, *_) = json.loads(advise(capsys, *WISHES, "recipe=baseline", "batch=16", "--json"))["options"].values()
    words = shlex.split(option["command"])
    assert words[:3] == ["inpaint-bench", "launch", "-m"]
    words = [word.replace("data=folder", "data=synthetic") for word in words[3:] if not word.startswith("data.root=")]
    assert launch.main(["-m", *words, "dry_run=true", f"hydra.sweep.dir={tmp_path}"]) == 0
    assert "Dry run" in capsys.readouterr().out


def test_what_cannot_be_done_says_what_could(capsys: pytest.CaptureFixture[str]) -> None:
    text = advise(capsys, *WISHES, "deadline_h=0.3", "budget_su=0.1", code=1)
    assert "No option keeps to 0.3 h and 0.1 SU." in text
    assert "0.3 h, least budget: 9.9 min and 0." in text
    assert "least budget of all: 53.3 min and 0." in text
    assert "0.6 SU, least time: 5.82 min and 0." in advise(capsys, *WISHES, "deadline_h=0.01", "budget_su=0.6", code=1)


def test_a_batch_that_ran_is_proposed_though_it_is_predicted_not_to_fit(capsys: pytest.CaptureFixture[str]) -> None:
    text = advise(capsys, *WISHES, "gpu=h200", "recipe=baseline", "batch=104")
    assert "h200 at delta, recipe baseline, batch 104" in text
    assert "measured (n = 1, 2026-11-30-h200-counters)" in text


def test_co2_is_shown_where_the_site_has_a_grid_intensity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "CO2" not in advise(capsys, *WISHES, "gpu=h200")
    (tmp_path / "config.yaml").write_text("sites.delta.grid_gco2_per_kwh: 400\n")
    monkeypatch.setenv("INPAINT_BENCH_CONFIG", str(tmp_path / "config.yaml"))
    found = json.loads(advise(capsys, *WISHES, "gpu=h200", "--json"))["options"]["fastest"]
    assert found["gco2"] == pytest.approx([joules / 3.6e6 * 400 for joules in found["joules"]])
    assert "kg of CO2" in advise(capsys, *WISHES, "gpu=h200")


def test_a_price_in_another_currency_is_no_budget_in_usd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "config.yaml"
    monkeypatch.setenv("INPAINT_BENCH_CONFIG", str(own))
    for currency, shown in (("USD", True), ("EUR", False)):
        own.write_text(f"sites.delta.charging.price_per_unit: 0.5\nsites.delta.charging.currency: {currency}\n")
        assert ("USD" in advise(capsys, *WISHES, "gpu=h200")) == shown


def test_a_site_whose_jobs_cannot_requeue_themselves_gets_no_training_beyond_one_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: the printed command did a part of the training."""
    long = [*WISHES[:1], "images=1e6", "epochs=10", "gpu=a40", "recipe=poster_baseline", "batch=16", "site=delta"]
    assert "rerun.timeout.requeues=7" in advise(capsys, *long)
    (tmp_path / "config.yaml").write_text("sites.delta.environment.container.image: /apps/torch.sif\n")
    monkeypatch.setenv("INPAINT_BENCH_CONFIG", str(tmp_path / "config.yaml"))
    assert app.main(["advise", *long]) == 2
    assert "takes longer than a job may run" in capsys.readouterr().err


def test_dataset_of_ones_own_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wishes = [*WISHES, "gpu=h200", "recipe=earlier_baseline", "batch=64", "--datasets"]
    dataset, own = ROOT / "benchmarks/results/2026-11-21-h200-batches", tmp_path / "mine"
    own.symlink_to(dataset)
    assert "measured (n = 2, mine)" in advise(capsys, *wishes, str(own))
    # Regression: a committed one made the answer older.
    assert advise(capsys, *wishes, str(dataset)) == advise(capsys, *wishes[:-1])


def test_datasets_of_ones_own_count_once_and_the_newest_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wishes, results = [*WISHES, "gpu=h200", "recipe=tuned_hopper", "batch=16", "gpus=1"], ROOT / "benchmarks/results"
    for name, source in {"z": "2026-11-23-h200-ladder", "a": "2026-11-28-h200-exchange"}.items():
        (tmp_path / name).symlink_to(results / source)
    own = ["--datasets", str(tmp_path / "a")]
    once = advise(capsys, *wishes, *own)
    assert "measured (n = 2, a)" in once
    assert advise(capsys, *wishes, *own, *own) == once
    assert advise(capsys, *wishes, "--datasets", str(tmp_path / "z"), *own) == once
    (tmp_path / "other").mkdir()
    (tmp_path / "other/a").symlink_to(results / "2026-11-26-h200-finetune")
    assert app.main(["advise", *wishes, *own, "--datasets", str(tmp_path / "other/a")]) == 2
    assert "two datasets have the name a" in capsys.readouterr().err


def test_recipes_are_spelled_as_launch_takes_them(capsys: pytest.CaptureFixture[str]) -> None:
    flux = ["model=flux_fill", "images=6500", "epochs=16", "gpu=h200"]
    answers = {
        advise(capsys, *flux, f"recipe={name}")
        for name in ("tuned_dit+fp8+attn_flash4", "'[fp8, tuned_dit, attn_flash4]'")
    }
    assert len(answers) == 1
    assert "recipe baseline+webdataset, batch 16" in advise(capsys, *WISHES, "recipe=webdataset", "gpu=h200")


def test_all_weights_are_told_beside_adapters(capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: of SDXL the earlier loop was the only option, of klein a recipe of n = 1 before one of n = 3."""
    text = advise(capsys, "model=sdxl_inpaint", "images=6500", "epochs=16")
    assert "cuda_graph+adamw_fused (adapters), batch 16" in text
    assert "all weights:\n    h200 at delta, recipe earlier_baseline, batch 16" in text
    assert "recipe tuned_dit+fp8+attn_flash4" in advise(capsys, "model=flux2_klein", "images=1e5", "epochs=1")


def test_one_gpu_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert "2 x h200" in advise(capsys, *WISHES)
    assert "2 x h200" not in advise(capsys, *WISHES, "gpus=1")
    # Regression: as if this machine had no such card.
    assert "2 x h200 at local" in advise(capsys, *WISHES, "gpus=2", "site=local", "gpu=h200")


def test_published_hours_are_not_ranked_as_they_hold_no_start(capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: a plain loop on an A100 was the fastest for 300 images."""
    assert "published by" not in advise(capsys, *WISHES[:1], "images=300", "epochs=1")


def test_a_training_beyond_all_starts_of_a_job_gets_more_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: its dry run said to raise a time limit that was the partition's, and gave its hours without it."""
    long = [*WISHES[:1], "images=1e6", "epochs=10", "gpu=a40", "recipe=poster_baseline", "batch=16", "site=delta"]
    arguments = shlex.split(next(line for line in advise(capsys, *long).splitlines() if " launch -m " in line))[2:]
    arguments = [argument for argument in arguments if not argument.startswith("data")] + ["dry_run=true"]
    assert arguments[-2] == "rerun.timeout.requeues=7"
    assert launch.main([*arguments, f"hydra.sweep.dir={tmp_path / 'enough'}"]) == 0
    assert "raise" not in capsys.readouterr().out
    assert launch.main([*arguments, "rerun.timeout.requeues=3", f"hydra.sweep.dir={tmp_path / 'few'}"]) == 0
    text = capsys.readouterr().out
    assert "2880 min in each of 4 starts; raise rerun.timeout.requeues" in text
    assert "likely 192 (192 to 192) h of jobs" in text


@pytest.mark.parametrize(
    ("wishes", "sentence"),
    [
        (["modell=x"], "modell=x: no such key. Did you mean model?"),
        (["model=sd15_inpaint", "images=6500"], "epochs: missing"),
        (["model=sd15", "images=", "epochs=1"], "images=: must be a whole number above 0"),
        (["model=sd15", "images=nan", "epochs=1"], "images=nan: must be a whole number above 0"),
        (["model=sd16", "images=1", "epochs=1"], "model=sd16: no such model. Did you mean sd15"),
        ([*WISHES, "gpu=b900"], "gpu=b900: no such gpu."),
        ([*WISHES, "recipe=tunned"], "recipe tunned: tunned: no such recipe or lever. Did you mean tuned?"),
        ([*WISHES, "px=1024"], "px=1024: no option is known. If one of these changes, there is px=512. Run it once"),
        (
            [*WISHES, "gpu=h100"],
            "gpu=h100: no option is known. If one of these changes, there is gpu=a100, a40, h200; site=local (this",
        ),
        ([*WISHES, "gpu=a40", "batch=64"], "If one of these changes, there is gpu=h200; batch=4, 8, 16, 24. Run it"),
        ([*WISHES, "gpus=2", "site=grace"], "If one of these changes, there is gpus=1; site=delta. Run it once"),
        (
            [*WISHES, "recipe=tuned,tuned_hopper"],
            "recipe=tuned,tuned_hopper: give one recipe; [a,b] and a+b are recipes",
        ),
        ([*WISHES, "recipe=[tuned"], "recipe=[tuned: give one recipe"),
        ([*WISHES[:1], "images=6500.5", "epochs=1"], "images=6500.5: must be a whole number above 0"),
        ([*WISHES, "budget_su=1", "budget_usd=1"], "budget_su and budget_usd: give one budget"),
        ([*WISHES, "budget_usd=1"], "budget_usd: no site has USD for these options"),
        (["model=flux", "images=1", "epochs=1"], "model=flux: no option is known. Run it once"),
        ([*WISHES, "--datasets", "nowhere"], "nowhere does not exist"),
    ],
)
def test_mistakes_get_a_sentence(wishes: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["advise", *wishes]) == 2
    assert sentence in capsys.readouterr().err
