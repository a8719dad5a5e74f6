"""What `launch --help` and docs/configuration.md say about keys."""

from __future__ import annotations

import pytest

from inpaint_bench.cli import app
from inpaint_bench.core import key_docs
from inpaint_bench.core.paths import ROOT


@pytest.mark.parametrize("group", key_docs.groups())
def test_every_key_has_a_description(group: str) -> None:
    keys = key_docs.keys_of(group)
    assert keys
    assert [key.path for key in keys if not key.description] == []


def test_document_of_the_configuration_is_current() -> None:
    written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert written == key_docs.as_markdown(), "python -m inpaint_bench.core.key_docs > docs/configuration.md"


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        ([], ["gpu: a100, a100_80gb, a40", "-m, --multirun", "  batch=16\n      images per step and GPU"]),
        (
            ["recipe"],
            [
                "recipe=NAME, one of: adamw_8bit,",
                "tuned_hopper",
                "tuned_online,",
                "  recipe.num_workers=4\n      processes of the data loader",
            ],
        ),
        (["workload=sd_inference"], ["workload.guidance", "workload.sampler=plms"]),
        (["sites"], ["site.account.value=null", "site.gpus.<name>.max_minutes"]),
    ],
)
def test_help_lists_keys_with_default_and_meaning(
    arguments: list[str], texts: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert app.main(["launch", "--help", *arguments]) == 0
    out = capsys.readouterr().out
    assert [text for text in texts if text not in out] == []
