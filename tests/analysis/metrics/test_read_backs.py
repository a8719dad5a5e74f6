"""What is read back of a lever decides in merge whether it is active, whatever the manifest says."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from analysis.dataset import open_dataset
from analysis.metrics import flags, run_row
from analysis.metrics.audit import bounds
from analysis.metrics.facts import Facts
from inpaint_bench.core.config.levers import FIELDS, is_active
from inpaint_bench.core.config.recipe import without_levers as baseline
from inpaint_bench.core.records import LeverReport, MemoryPeaks
from tests.analysis import real_run
from tests.analysis.build import load_run
from tests.analysis.committed import DATASETS, RESULTS

FLUX = {"parameters": 11_902_391_360}
COUNTS = {"flash4": 0, "flash": 0, "cudnn": 0, "efficient": 0, "math": 0}
STATE = {"state_mib": 50.0, "state_of_all_mib": 100.0, "weights_mib": 200.0, "weights_of_all_mib": 200.0}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    run, tables = load_run(real_run.write_run(tmp_path_factory.mktemp("levers") / "run", "r-01"))
    return Facts(manifest=run.manifest, windows=run.windows, tables=tables, files=run)


def with_lever(sound: Facts, field: str, requested: Any, effective: Any, active: bool | None = True) -> Facts:
    lever = LeverReport(name=field, field=field, requested=requested, effective=effective, active=active)
    manifest = msgspec.structs.replace(sound.manifest, levers=[lever], recipe=field, overrides=[])
    return Facts(manifest=manifest, windows=sound.windows, tables=sound.tables, files=sound.files)


ACTIVE: list[tuple[str, Any, Any]] = [
    ("linears", "fp8", 494),
    ("frozen_storage", "nf4", {"layers": 494, "weights_mib": 5995.688}),
    ("frozen_storage", "fp8", {"layers": 26, "of": 26, "weights": 2**20, "weights_mib": 1.06}),
    ("compile", "blocks", {"graphs": 8, "breaks": 0}),
    ("attention", "flash4", COUNTS | {"flash4": 16, "math": 12}),
    ("attention", "cudnn", COUNTS | {"cudnn": 24, "flash": 8}),
    ("attention", "efficient", {"flash": 0, "cudnn": 48, "efficient": 98, "math": 0}),
    ("attention", "math", COUNTS | {"math": 16}),
    ("exchange", "in_place", 36),
    ("lora_alpha", 6.0, [6.0]),
    ("tf32", True, {"matmul": True, "conv": True}),
    ("tf32", True, True),
    ("unet", "nhwc", "NhwcUNet"),
    ("weights", "bf16_split", "bf16"),
    ("weights", "half", "torch.bfloat16"),
    ("optimizer", "adamw_loop", {"class": "torch.AdamW", "fused": False, "foreach": False}),
    ("optimizer", "adamw_8bit", {"class": "bitsandbytes.AdamW8bit", "fused": None, "foreach": None}),
    ("bucket_mb", 50, 50 * 2**20),
    ("compress", "bf16", "bf16_compress_hook"),
    ("sharding", "zero1", STATE),
    ("cache_text", True, 0),
    ("ema", True, 0.9999),
    ("num_workers", 0, 0),
    ("of_a_later_version", "x", {"any": "thing"}),
]
REFUTED: list[tuple[str, Any, Any]] = [
    ("linears", "fp8", 0),
    ("frozen_storage", "nf4", {"layers": 494, "weights_mib": 22_582.0}),
    ("frozen_storage", "nf4", {"layers": 494, "weights_mib": 11_291.789}),
    ("frozen_storage", "fp8", {"layers": 247, "weights_mib": 5645.9}),
    ("frozen_storage", "fp8", {"layers": 13, "of": 26, "weights": 2**20, "weights_mib": 1.06}),
    ("frozen_storage", "fp8", {"layers": 0, "weights_mib": 0.0}),
    ("compile", "default", {"graphs": 0, "breaks": 12}),
    ("compile", "default", "12 breaks"),
    ("attention", "flash4", COUNTS | {"flash": 57}),
    ("attention", "flash4", COUNTS | {"flash4": 16, "efficient": 2}),
    ("attention", "flash", COUNTS | {"math": 57}),
    ("attention", "flash", {"flash": 2, "cudnn": 193, "efficient": 0, "math": 0}),
    ("attention", "cudnn", COUNTS | {"flash": 32}),
    ("attention", "efficient", COUNTS),
    ("exchange", "in_place", 0),
    ("lora_rank", 16, {"rank": 8, "layers": 190}),
    ("lora_rank", 16, {"rank": 16, "layers": 0}),
    ("lora_alpha", 6.0, [6.0, 1.0]),
    ("lora_text_encoder", True, 0),
    ("checkpoint_keeps", "products", 0),
    ("tf32", True, {"matmul": True, "conv": False}),
    ("unet", "nhwc", "UNet2DConditionModel"),
    ("weights", "bf16_split", "bf16, fp32"),
    ("weights", "half", "fp32"),
    ("precision", "bf16", "fp32"),
    ("precision", "bf16", "bf16, fp32"),
    ("channels_last", True, 0.07),
    ("cuda_graph", True, False),
    ("optimizer", "adamw_fused", {"class": "torch.AdamW", "fused": False, "foreach": False}),
    ("optimizer", "adamw_8bit", {"class": "torch.AdamW", "fused": False, "foreach": False}),
    ("bucket_mb", 50, 25 * 2**20),
    ("sharding", "zero1", STATE | {"state_mib": 100.0}),
    ("cache_text", True, 1),
    ("accumulate", 4, 1),
    ("format", "memmap", "files"),
]


@pytest.mark.parametrize(("field", "requested", "effective"), ACTIVE)
def test_what_fits_is_active(field: str, requested: Any, effective: Any) -> None:
    assert is_active(field, requested, effective, FLUX)


@pytest.mark.parametrize(("field", "requested", "effective"), REFUTED)
def test_what_does_not_fit_is_not_active(field: str, requested: Any, effective: Any) -> None:
    assert not is_active(field, requested, effective, FLUX)


def test_every_field_judges_any_value_that_is_read_back() -> None:
    for field in FIELDS:
        for value in (None, {}, [], "", -1, float("nan"), {"layers": "x"}):
            assert is_active(field, getattr(baseline("cuda"), field), value, {}) in (True, False)


def test_one_image_that_is_not_cached_is_encoded() -> None:
    assert is_active("cache_image", True, 1, {"encodes_online": 1})
    assert not is_active("cache_image", True, 1, {"encodes_online": 0})


@pytest.mark.parametrize("active", [True, None])
def test_a_lever_that_is_refuted_is_listed_as_not_active(sound: Facts, active: bool | None) -> None:
    facts = with_lever(sound, "exchange", "in_place", 0, active)
    row = run_row.summarise(facts)
    assert row["inactive_levers"] == "exchange"
    assert "lever exchange was requested and not found active: 0 was read back" in row["warnings"]
    assert flags.Flag.LEVER_INACTIVE in flags.run_flags(facts, flags.window_flags(facts), None)
    contradicts = "lever exchange is called active, and 0 was read back" in (row["invalid_reason"] or "")
    assert contradicts == bool(active)


def test_a_lever_of_which_nothing_was_read_back_is_not_active(sound: Facts) -> None:
    row = run_row.summarise(with_lever(sound, "exchange", "in_place", None))
    assert "lever exchange is called active, and nothing was read back" in row["invalid_reason"]
    assert run_row.summarise(with_lever(sound, "exchange", "in_place", None, active=None))["inactive_levers"] is None


def test_a_lever_that_the_recipe_takes_back_needs_no_read_back(sound: Facts) -> None:
    facts = with_lever(sound, "cuda_graph", True, 1)
    for name, inactive in (("no_cache_masked", None), ("cache_masked", "cache_masked")):
        facts.manifest.recipe = f"cuda_graph+{name}"
        assert run_row.summarise(facts)["inactive_levers"] == inactive


def test_the_levers_of_all_committed_runs_are_judged_as_they_were() -> None:
    for name in DATASETS:
        for row in open_dataset(RESULTS / name).runs.filter(status="completed").iter_rows(named=True):
            for lever in json.loads(row["levers"] or "[]"):
                judged = is_active(lever["field"], lever["requested"], lever["effective"], row)
                assert lever["effective"] is None or judged == lever["active"], (name, row["run_id"], lever)


def test_the_committed_runs_that_lack_layers_in_fp8_state_no_parameters() -> None:
    """What the layers hold is in no manifest: the number is not known."""
    counted: set[str] = set()
    for name in (name for name in DATASETS if "flux" in name or "fp8" in name):
        for row in open_dataset(RESULTS / name).runs.filter(status="completed").iter_rows(named=True):
            assert row["parameters"] in (11_902_391_360, None)
            reason = "parameters=counted without the layers whose frozen weights are in FP8"
            assert (row["parameters"] is None) == ("+fp8" in row["recipe"]) == (reason in row["null_reasons"])
            counted |= {row["run_id"]} if row["parameters"] is None else set()
    assert len(counted) == 9


@pytest.mark.parametrize(
    ("field", "storage", "allocated_mib", "fits"),
    [
        ("frozen_storage", "nf4", 9_000.0, True),
        ("frozen_storage", "nf4", 5_000.0, False),
        ("frozen_storage", "fp8", 15_000.0, True),
        ("frozen_storage", "fp8", 9_000.0, False),
        ("linears", "fp8", 15_000.0, True),
        ("linears", "fp8", 9_000.0, False),
        ("attention", "flash", 24_000.0, True),
        ("attention", "flash", 15_000.0, False),
    ],
)
@pytest.mark.parametrize("trained", [7_274_496, None])
def test_memory_is_at_least_that_of_the_weights_as_they_are_stored(
    sound: Facts, field: str, storage: str, allocated_mib: float, fits: bool, trained: int | None
) -> None:
    facts = with_lever(sound, field, storage, 494)
    stated = FLUX | {"weights_precision": "half", "parameters_trained": trained}
    stated["parameters_by_network"] = {"unet": FLUX["parameters"], **({"lora": trained} if trained else {})}
    facts.manifest.workload_facts = stated
    facts.manifest.memory = MemoryPeaks(allocated_peak_mib=allocated_mib, reserved_peak_mib=allocated_mib)
    told = [text for text in bounds.check_manifest(facts) if "do not ascend" in text]
    assert bool(told) != fits
