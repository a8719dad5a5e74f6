"""What a site over ssh answers is weighed, shown and written down only where it can be so."""

import json

import pytest
from omegaconf import OmegaConf

from inpaint_bench.cli import app
from inpaint_bench.core.site import ConnectConfig, SiteConfig
from launchers.remote import client, ssh
from launchers.sweep.ledger import Ledger

ATTEMPT = {
    "kind": "attempt",
    "point": 0,
    "attempt": 1,
    "run_id": "r-0",
    "group": "00-delta",
    "job_id": "77_0",
    "refused": None,
    "cancelled": False,
    "word": {"state": "PENDING", "detail": "Priority", "raw": "squeue: PENDING Priority"},
    "left": {"manifest": None},
}
LOOKED = {"kind": "answer", "squeue": "ok", "sacct": "ok", "busy": False, "sweep": True}


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """A sweep whose point is at delta, over a connection that answers these lines."""
    connect = ConnectConfig(method="ssh", host="delta", folder="/scratch/me")
    site = SiteConfig(name="delta", python="/usr/bin/python3", connect=connect)
    ledger = Ledger(tmp_path / "sweep")
    ledger.folder.mkdir()
    ledger.create(sweep_id="s1")
    entry = {"point": 0, "overrides": ["gpu=h200"], "gpu": "h200", "batch": 8, "site": "delta"}
    ledger.know([entry], {"delta": OmegaConf.to_container(OmegaConf.structured(site))})
    ledger.append("planned", group="00-delta", job_name="j", site="delta", points=[[0, 1, "r-0"]], asked=[entry])
    ledger.append("staged", site="delta", root="/scratch/me/s1", code="abc")

    def answer(*lines: dict) -> Ledger:
        out = b"".join(client.MARK + json.dumps(line).encode() + b"\n" for line in (*lines, {"kind": "end"}))
        monkeypatch.setattr(ssh.Connection, "run", lambda *_, **__: ssh.Answer(code=0, out=out, err=""))
        return ledger

    return answer


def told(ledger, capsys) -> dict:
    capsys.readouterr()
    assert app.main(["status", str(ledger.folder), "--json"]) == 0
    (point,) = json.loads(capsys.readouterr().out)["points"]
    return point


def test_a_right_answer_is_believed(asked, capsys):
    point = told(asked(LOOKED, ATTEMPT), capsys)
    assert (point["state"], point["job_id"]) == ("queued", "77_0")


@pytest.mark.parametrize(("busy", "state"), [(True, "unknown"), (False, "planned")])
def test_what_is_planned_there_is_not_known_while_it_is_being_submitted(busy, state, asked, capsys):
    point = told(asked(LOOKED | {"busy": busy}, ATTEMPT | {"job_id": None, "word": None}), capsys)
    assert point["state"] == state
    assert ("delta is still submitting" in point["message"]) is busy


@pytest.mark.parametrize(
    "wrong",
    [
        *({"point": "0"}, {"point": True}, {"attempt": -1}, {"attempt": 10**9}, {"run_id": "r\x1b[2J"}, {"run_id": 7}),
        *({"group": "../../etc"}, {"group": ".."}, {"group": ""}, {"group": None}, {"job_id": "pid:1@here"}),
        *({"job_id": "77_0\n"}, {"job_id": 77}, {"refused": ["no"]}, {"word": "PENDING"}, {"word": {"state": "A B"}}),
        *({"word": {"state": "PENDING", "start_unix": 1e300}}, {"word": {"state": "PENDING", "detail": 3}}),
        *({"left": None}, {"left": {"manifest": []}}, {"left": {"manifest": None, "manifest_age_s": "long"}}),
    ],
)
def test_a_wrong_answer_is_a_sentence_and_changes_nothing(wrong, asked, capsys):
    ledger = asked(LOOKED, ATTEMPT | wrong)
    before = (ledger.folder / "ledger.jsonl").read_bytes()
    point = told(ledger, capsys)
    assert point["state"] == "unknown"
    assert "delta: its answer cannot be read" in point["message"]
    assert (ledger.folder / "ledger.jsonl").read_bytes() == before


def test_words_that_would_steer_a_terminal_are_shown_without_that(asked, capsys):
    said = {"state": "PENDING", "detail": "red \x1b[31m", "raw": "squeue: \x1b[2JPENDING"}
    ledger = asked(LOOKED | {"squeue": "\x1b[2Jok"}, ATTEMPT | {"word": said, "refused": "no \x1b[31m"})
    capsys.readouterr()
    for words in ([], ["--point", "0"]):
        assert app.main(["status", str(ledger.folder), *words]) == 0
        out = capsys.readouterr().out
        assert "PENDING" in out or "queued" in out
        assert "\x1b" not in out


@pytest.mark.parametrize("wrong", [{"point": [0]}, {"job_id": "1;reboot_0"}, {"refused": 7}, {"attempt": None}])
def test_what_became_of_points_is_not_known_where_the_answer_is_wrong(wrong):
    line = {name: ATTEMPT[name] for name in ("kind", "point", "attempt", "job_id", "refused")}
    assert client._became([line], "delta") == {(0, 1): ("77_0", None)}
    with pytest.raises(client.RemoteError, match="delta: its answer cannot be read"):
        client._became([line | wrong], "delta")


def test_a_complaint_without_words_is_still_one(asked, capsys):
    ledger = asked(LOOKED, ATTEMPT, {"kind": "complaint"})
    assert app.main(["cancel", str(ledger.folder)]) == 2
    assert "delta: " in capsys.readouterr().err
    assert not ledger.points()[0].last.cancelled
