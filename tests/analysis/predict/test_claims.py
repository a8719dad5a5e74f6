"""Claims are scored where their cell is measured, and nothing passes for a prediction that was made afterwards."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import msgspec
import pytest

from analysis import merge
from analysis.predict.claims import Claim, ClaimedCell, add_claims, read_claims
from inpaint_bench.cli import app
from inpaint_bench.core.errors import UserError
from tests.analysis.build import UNIX0, write_run

BEGAN = dt.datetime.fromtimestamp(UNIX0 / 1e9, dt.UTC)  # of the run
DAY = dt.timedelta(days=1)


def claim(value: float | None, low: float, high: float, made_at: dt.datetime = BEGAN - DAY, **cell: object) -> Claim:
    fields = {"model": "sd15_inpaint", "recipe": "baseline", "gpu": "a40", "batch": 8, **cell}
    cell_ = ClaimedCell(**fields)  # type: ignore[arg-type]
    return Claim(kind="cards", cell=cell_, value=value, low=low, high=high, made_at=made_at, inputs=[])


def test_the_report_scores_them_by_class_and_by_when_they_were_made(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "r-01")  # 16 images/s on an A40
    merge.merge([tmp_path / "runs"], tmp_path / "ds")
    made = [
        claim(20.0, 15.0, 25.0),
        claim(14.4, 14.0, 15.0),
        claim(None, 10.0, 30.0, BEGAN + DAY),
        claim(9, 8, 10, batch=16),
    ]
    add_claims(tmp_path / "claims.json", made)
    arguments = ["report", str(tmp_path / "ds"), "-o", str(tmp_path / "out"), "--export", "csv"]
    assert app.main([*arguments, "--predictions", str(tmp_path / "claims.json")]) == 0
    errors = (tmp_path / "out" / "tables" / "prediction-errors.csv").read_text()
    assert "cards,no,1,,,1 of 1" in errors
    assert "cards,yes,2,17.5,25.0,1 of 2" in errors
    assert "3 of 4 claims have a measured cell here; 1 are open" in (tmp_path / "out" / "report.md").read_text()


def test_a_claim_in_the_file_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "claims.json"
    assert add_claims(path, [claim(20.0, 15.0, 25.0)]) == 1
    again = claim(20.0, 15.0, 25.0, BEGAN + DAY)
    assert add_claims(path, [again, claim(21.0, 15.0, 25.0)]) == 1
    assert [(each.value, each.made_at) for each in read_claims(path)] == [(20.0, BEGAN - DAY), (21.0, BEGAN - DAY)]


def test_a_file_of_something_else_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "claims.json"
    with pytest.raises(UserError, match="does not exist; `inpaint-bench predict` writes such a file"):
        read_claims(path)
    path.write_text("{}")
    with pytest.raises(UserError, match="give a file that `inpaint-bench predict` wrote"):
        read_claims(path)
    naive = msgspec.structs.replace(claim(20.0, 15.0, 25.0), made_at=dt.datetime(2026, 11, 23))
    path.write_bytes(msgspec.json.encode([naive]))
    with pytest.raises(UserError, match="has no time zone"):
        read_claims(path)
