"""docs/campaign.md shows what is planned, what the committed datasets have of it, and what is missing."""

import polars as pl
import pytest

from benchmarks import campaign
from inpaint_bench.core.errors import UserError

LINE = {"part": "", "workload": "finetune_inpaint", "model": "sd15_inpaint", "batch": "16", "gpus": "1", "where": ""}
LINE |= {"resolution_px": "512", "since": "", "goal": "", "command": "", "n": 3, "cards": 3, "minutes": 2.0}


@pytest.fixture(scope="module")
def runs():
    """Read the datasets that were there when the expected values were written."""
    later = pl.col("dataset").is_in(
        ["2026-11-28-h200-exchange", "2026-11-28-h200-headlines", "2026-11-28-h200-breadth"]
    )
    return campaign.read_runs().filter(~later, pl.col("dataset") < "2026-11-29")


def test_page_is_what_plan_and_datasets_say(monkeypatch):
    monkeypatch.setattr("sys.argv", ["campaign", "--check"])
    assert campaign.main() == 0, "stale: run python -m benchmarks.campaign"


def test_stale_page_is_refused(monkeypatch, tmp_path, runs):
    monkeypatch.setattr(campaign, "read_runs", lambda: runs)
    (tmp_path / "campaign.md").write_text("as it was")
    monkeypatch.setattr(campaign, "TARGET", tmp_path / "campaign.md")
    monkeypatch.setattr("sys.argv", ["campaign", "--check"])
    with pytest.raises(UserError, match=r"campaign\.md: is stale, run python -m benchmarks\.campaign"):
        campaign.main()
    assert (tmp_path / "campaign.md").read_text() == "as it was"


def test_queue_has_a_line_for_each_cell_that_lacks_a_run(monkeypatch, runs):
    monkeypatch.setattr(campaign, "read_runs", lambda: runs)
    plan = [LINE | {"part": "Some runs", "recipe": recipe, "cards": 1} for recipe in ("baseline", "tuned_hopper+ema")]
    plan[1]["command"] = "inpaint-bench launch -m site=local gpu=h200 recipe=tuned_hopper+ema 'a=[1]'"
    monkeypatch.setattr(campaign, "read_plan", lambda: [*plan, plan[1] | {"gpus": "2"}])
    assert list(campaign.queue("h200")) == ["some-2 recipe=tuned_hopper+ema 'a=[1]'"]
    assert list(campaign.queue("h200", "2")) == ["some-3 recipe=tuned_hopper+ema 'a=[1]'"]


def test_an_option_that_is_none_writes_no_page(monkeypatch, tmp_path):
    monkeypatch.setattr(campaign, "TARGET", tmp_path / "campaign.md")
    monkeypatch.setattr("sys.argv", ["campaign", "--chek"])
    with pytest.raises(UserError, match="--chek: no such option; there are --check, and --queue h100"):
        campaign.main()
    assert not campaign.TARGET.exists()


@pytest.mark.parametrize(
    ("line", "datasets"),
    [
        # The first was requested as encoders_half+pin_memory+non_blocking.
        ({"recipe": "baseline"}, {"2026-11-27-h200-yardstick", "2026-11-28-h100-yardstick"}),
        # The bundle, and its levers one by one as the last step of a ladder.
        ({"recipe": "tuned", "gpus": ""}, {"2026-11-23-h200-ladder", "2026-11-23-h200-two-gpus"}),
        ({"recipe": "tuned_hopper", "since": "2026-11-28"}, {"2026-11-28-h100-yardstick"}),
        # Older code called this prefetch_4 and workers_8; channels_last was not active.
        ({"recipe": "poster_optimized"}, {"2026-11-28-h200-poster"}),
        ({"workload": "sd_inference", "model": "sd2", "recipe": "", "batch": ""}, {"2026-11-25-h100-inference"}),
        (
            {"recipe": "", "where": "valid AND gpus = '2'", "gpus": "", "since": "2026-11-24"},
            {"2026-11-26-h200-two-gpus"},
        ),
        # Trainings whose losses are compared share a card.
        ({"model": "flux_fill", "recipe": "tuned_dit+fp8+attn_flash4", "batch": "4"}, {"2026-11-26-h200-flux"}),
        ({"recipe": "tuned_hopper", "where": "valid AND window_s > 600"}, set()),
    ],
)
def test_a_cell_is_found_by_its_levers_whatever_its_runs_are_called(runs, line, datasets):
    by_gpu = campaign.select({**LINE, **line}, runs)
    assert {name for same in by_gpu.values() for name in same["dataset"]} == datasets


def test_runs_with_position_tokens_do_not_count_for_a_command_without_them(runs):
    """Regression: 3 runs without tokens and 8 with them were one row of 11, called complete."""
    line = {**LINE, "recipe": "tuned_hopper", "since": "2026-11-26"}
    assert "2026-11-26-h200-finetune" in campaign.select(line, runs)["h200"]["dataset"]
    own = campaign.select({**line, "command": "inpaint-bench launch -m model.location_tokens=0"}, runs)["h200"]
    assert {*own["dataset"]} == {"2026-11-27-h200-yardstick"}


def test_a_row_has_the_figures_of_a_type_of_card_and_what_is_missing(runs):
    line = {**LINE, "recipe": "tuned_online", "since": "2026-11-27"}
    left, (h100, h200) = campaign.rows(line, runs)
    same = campaign.select(line, runs)["h200"]
    rates = same["images_per_s"]
    assert f"| H200: n = 3, 1 card | {rates.mean():.2f} ({rates.min():.2f} to {rates.max():.2f}) |" in h200
    assert "| 2 more cards | 2026-11-27-h200-yardstick |" in h200
    assert "| 1 more run, 2 more cards |" in h100
    assert left == 2 * 2.0  # two further runs on an H200, each on another card
    left, (row,) = campaign.rows({**line, "batch": "17"}, runs)
    assert left == 3 * 2.0
    assert "| \u2013 | \u2013 | \u2013 | 3 more runs, 3 more cards |" in row
    left, (h100, h200) = campaign.rows({**line, "cards": 1}, runs)
    assert left == 0
    assert "| **complete** |" in h200
    assert "| 1 more run |" in h100


def test_several_cards_of_one_run_all_count(runs):
    line = {**LINE, "recipe": "tuned_hopper+exchange_in_place", "gpus": "2", "since": "2026-11-26", "cards": 4}
    left, (row,) = campaign.rows(line, runs)
    assert "| H200: n = 1, 2 cards |" in row
    assert "| 2 more runs, 2 more cards |" in row
    assert left == 2 * 2.0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("\t3\t3\t", "\tthree\t3\t", r"campaign\.tsv: n=three: must match"),
        ("\t3\t3\t", "\t\t3\t", r"campaign\.tsv: n=: must match"),
        ("\t3\t3\t", "\t3\t0\t", r"campaign\.tsv: cards=0: must match"),
        ("\t1\t512\t", "\ttwo\t512\t", r"campaign\.tsv: gpus=two: must match"),
        ("\tfinetune_inpaint\t", "\tfinetune\t", r"campaign\.tsv: workload=finetune: must match"),
        ("\t2026-11-2", "\t26-11-2", r"campaign\.tsv: since=26-11-2\d: must match"),
        ("\tsince\t", "\tsinse\t", r'campaign\.tsv: .*"since"'),
        ("\t512\t\t", "\t512\tvalid AND\t", r"campaign\.tsv: "),
        ("\t512\t\t", "\t512\tvlaid\t", r'campaign\.tsv: .*"vlaid"'),
        ("tuned_online", "tuned_onlin", r"recipe tuned_onlin: tuned_onlin: no such recipe or lever\. Did you mean"),
        ("\t3\t3\t", "\t3\t3\t3\t", r"campaign\.tsv: found more fields than defined"),
    ],
)
def test_a_wrong_plan_is_refused_in_a_sentence(monkeypatch, tmp_path, runs, old, new, message):
    monkeypatch.setattr(campaign, "read_runs", lambda: runs)
    plan = tmp_path / "campaign.tsv"
    plan.write_text(campaign.PLAN.read_text().replace(old, new, 1))
    monkeypatch.setattr(campaign, "PLAN", plan)
    with pytest.raises(UserError, match=message):
        campaign.page()
