"""A carried file gives back what was put in, or nothing: cut, changed and hostile ones are refused."""

import hashlib
import io
import json
import tarfile

import pytest

from launchers.away import bundle, carry
from launchers.away.bundle import BundleError, CutError, Source
from launchers.record.ledger import Ledger

ATTEMPT = {
    "point": 6,
    "attempt": 1,
    "run_id": "r-6",
    "site": "delta",
    "group": "00-delta",
    "job_name": "inpaint-s1-00-delta",
    "job_id": "77_0",
    "refused": None,
    "cancelled": False,
}
RUN = {
    "6/attempt-1/steps/part-000000.parquet": b"rows",
    "logs/00-delta/77_0_0_log.out": b"said\n",
    "6/attempt-1/manifest.json": b'{"status": "completed"}',
}


def packed(files: dict[str, bytes], head: dict | None = None) -> bytes:
    out = io.BytesIO()
    bundle.write(out, head or {"kind": "test"}, [Source(path=path, content=content) for path, content in files.items()])
    return out.getvalue()


def unpacked(content: bytes) -> dict[str, bytes]:
    stream, files = io.BytesIO(content), {}
    index = bundle.read_index(stream)
    bundle.read_files(stream, index, lambda member, chunks: files.update({member.path: b"".join(chunks)}))
    return files


def forged(entries: list[tuple[tarfile.TarInfo, bytes]], listed: list[list]) -> bytes:
    """A tar whose list says `listed` and is in order, and which holds `entries`."""
    text = json.dumps({"head": {"kind": "test"}, "files": listed}).encode()
    name = f"bundle.{hashlib.sha256(text).hexdigest()}.json"
    out = io.BytesIO(bundle._header(name, len(text)) + text + bytes(-len(text) % 512))
    out.seek(0, io.SEEK_END)
    for info, content in entries:
        info.size = len(content) if info.isreg() else 0
        out.write(info.tobuf(tarfile.PAX_FORMAT) + content + bytes(-len(content) % 512))
    out.write(bytes(1024))
    return out.getvalue()


def entry(path: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(path)
    info.type, info.linkname, info.mode = kind, link, 0o600
    return info


def line(path: object, content: bytes = b"x", size: object = None) -> list:
    return [path, len(content) if size is None else size, hashlib.sha256(content).hexdigest()]


def test_what_was_put_in_comes_out_and_any_tar_can_list_it():
    content = packed(RUN | {"empty.json": b"", "block.json": b"b" * 512})
    assert unpacked(content) == RUN | {"empty.json": b"", "block.json": b"b" * 512}
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        assert archive.getnames()[1:] == [*RUN, "empty.json", "block.json"]


def test_the_same_files_make_the_same_bundle():
    assert packed(RUN) == packed(RUN)


def test_no_byte_can_be_changed_unnoticed(tmp_path):
    content = packed(RUN)
    for place in range(0, len(content), 7):
        changed = bytearray(content)
        changed[place] ^= 1
        (tmp_path / "b.tar").write_bytes(changed)
        with pytest.raises(BundleError):
            bundle.verify(tmp_path / "b.tar")


def test_a_bundle_that_was_cut_anywhere_says_so():
    content = packed(RUN)
    for length in (*range(0, len(content), 97), len(content) - 1):
        with pytest.raises(CutError, match="cut off"):
            unpacked(content[:length])


def test_what_follows_the_last_file_is_refused():
    with pytest.raises(BundleError, match="follows its last file"):
        unpacked(packed(RUN) + b"more")


@pytest.mark.parametrize(
    "path",
    [
        *("/etc/passwd", "../up.json", "a/../../up.json", "a/./b", "a//b", "a/", "", ".", "..", "a/..."),
        *("a\\b", "a\nb", "a b", "a:b", "-rf", "x" * 241, "\x00", "ä.json", None, 7, ["a"]),
    ],
)
def test_a_path_that_is_not_plainly_below_its_root_is_refused(path):
    with pytest.raises(BundleError):
        unpacked(forged([(entry("a.json"), b"x")], [line(path)]))


@pytest.mark.parametrize(
    "kind",
    [
        *(tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE),
        *(tarfile.GNUTYPE_SPARSE, tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.AREGTYPE),
    ],
)
def test_links_devices_folders_and_every_other_kind_of_entry_are_refused(kind):
    with pytest.raises(BundleError, match="not what the list says"):
        unpacked(forged([(entry("a.json", kind, "/etc/passwd"), b"")], [line("a.json", b"")]))


@pytest.mark.parametrize("size", [-1, True, 1.5, "1", None, 1 << 33])
def test_a_size_that_cannot_be_is_refused(size):
    listed = [["a.json", size, hashlib.sha256(b"x").hexdigest()]]
    with pytest.raises(BundleError):
        unpacked(forged([(entry("a.json"), b"x")], listed))


def test_a_file_is_listed_once_and_is_where_the_list_says():
    twice = [(entry("a.json"), b"x"), (entry("a.json"), b"x")]
    with pytest.raises(BundleError, match="twice"):
        unpacked(forged(twice, [line("a.json"), line("a.json")]))
    with pytest.raises(BundleError, match="not what the list says"):
        unpacked(forged([(entry("b.json"), b"x")], [line("a.json")]))


def test_a_list_larger_than_memory_is_not_read():
    name = f"bundle.{'0' * 64}.json"
    with pytest.raises(BundleError, match="does not begin with its list"):
        unpacked(bundle._header(name, bundle.MAX_INDEX_BYTES + 1))


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04" + bytes(600), b"\x1f\x8b" + bytes(600), bytes(2048)])
def test_any_other_file_is_no_bundle(content, tmp_path):
    (tmp_path / "b.tar").write_bytes(content)
    with pytest.raises(BundleError, match=r"b\.tar: (not a bundle|it was cut off)"):
        bundle.verify(tmp_path / "b.tar")


@pytest.fixture
def sweep(tmp_path) -> Ledger:
    """A sweep that sent point 0 to grace and let point 6 be carried to delta."""
    ledger = Ledger(tmp_path / "sweep")
    ledger.folder.mkdir()
    asked = [
        {"point": n, "overrides": ["batch=2"], "gpu": None, "batch": None, "site": s}
        for n, s in ((0, "grace"), (6, "delta"))
    ]
    ledger.create(sweep_id="s1", overrides=[])
    ledger.know(asked, {"grace": {"reach": {"method": "slurm"}}, "delta": {"reach": {"method": "bundle"}}})
    ledger.append("elsewhere", points=[6], plan="plan.delta.yaml")
    ledger.append("planned", group="00-grace", job_name="j", site="grace", points=[[0, 1, "r-0"]], asked=[asked[0]])
    return ledger


def results(files: dict[str, bytes] = RUN, made_unix: float = 100.0, **changes: object) -> bytes:
    attempts = changes.pop("attempts", [ATTEMPT])
    head = {"kind": "results", "sweep_id": "s1", "made_unix": made_unix, "attempts": attempts}
    head["journals"] = [path for path in files if path.endswith(".journal.arrows")]
    return packed(files, head | changes)


def bring(content: bytes, ledger: Ledger) -> carry.Received:
    stream = io.BytesIO(content)
    index = bundle.read_index(stream)
    attempts = carry.check(index, ledger)
    received = carry.receive(stream, index, ledger, newest_unix=carry.newest(ledger, "delta"))
    carry.adopt(attempts, ledger, carried=True)
    ledger.append("collected", origin="delta", made_unix=index.head["made_unix"])
    return received


def everything(ledger: Ledger) -> dict[str, bytes]:
    files = (file for file in ledger.folder.rglob("*") if file.is_file() and not file.name.startswith("ledger"))
    return {str(file.relative_to(ledger.folder)): file.read_bytes() for file in files}


def test_results_that_are_brought_twice_are_there_once(sweep):
    assert bring(results(), sweep).new == 3
    before, records = everything(sweep), sweep.points()
    assert bring(results(), sweep).new == 0
    assert (everything(sweep), sweep.points()) == (before, records)
    (attempt,) = records[6].attempts
    assert (attempt.run_id, attempt.job_id, attempt.carried) == ("r-6", "77_0", True)


def test_results_do_not_change_what_a_point_asks_for(sweep):
    bring(results(attempts=[ATTEMPT | {"overrides": ["workload.module=evil"]}]), sweep)
    assert sweep.points()[6].overrides == ["batch=2"]


@pytest.mark.parametrize(
    "path",
    [
        *("0/attempt-1/manifest.json", "6/attempt-2/manifest.json", "sweep.json", "ledger.jsonl"),
        *("jobs/00-delta/77_0_submitted.pkl", "jobs/00-delta/77_0_0_log.out", "6/attempt-1/evil.pkl"),
        *("6/attempt-1/checkpoints/step-1/state.json", "code/abc/inpaint_bench/worker.py", "logs/other/x.out"),
        *("6/attempt-1/.hidden/x.json", "6/attempt-1/weights/model.json"),
    ],
)
def test_results_cannot_touch_what_is_not_a_file_of_their_own_runs(path, sweep):
    before = everything(sweep)
    with pytest.raises(BundleError, match="not a file of the runs that it brings"):
        bring(results(RUN | {path: b"evil"}), sweep)
    assert everything(sweep) == before


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sweep_id": "s2"}, "is sweep s1, and these are results of s2"),
        ({"kind": "plan"}, "holds no results"),
        ({"made_unix": "now"}, "lacks a time"),
        ({"attempts": [ATTEMPT | {"point": 3}]}, "point 3: is not in"),
        ({"attempts": [ATTEMPT | {"site": "grace"}]}, "was sent to delta, and these results are of grace"),
        ({"attempts": [ATTEMPT | {"point": 0, "site": "grace"}]}, "attempt 1 was sent from here"),
        ({"attempts": [ATTEMPT | {"run_id": "../../x"}]}, "in a way that cannot be"),
        ({"attempts": [ATTEMPT | {"refused": "red\x1b[31m"}]}, "in a way that cannot be"),
        ({"attempts": [ATTEMPT | {"job_id": 7}]}, "in a way that cannot be"),
        ({"attempts": [{}]}, "in a way that cannot be"),
        ({"attempts": [None]}, "in a way that cannot be"),
    ],
)
def test_results_of_something_else_are_refused(changes, says, sweep):
    with pytest.raises(bundle.UserError, match=says):
        bring(results(**changes), sweep)
    assert not (sweep.folder / "6").exists()


def test_a_folder_here_that_is_a_link_is_not_followed_out(sweep, tmp_path):
    (tmp_path / "outside").mkdir()
    (sweep.folder / "6").symlink_to(tmp_path / "outside")
    with pytest.raises(bundle.UserError, match="leads out of"):
        bring(results(), sweep)
    assert not list((tmp_path / "outside").iterdir())


def test_a_file_here_that_is_a_link_is_replaced_and_what_it_names_is_not(sweep, tmp_path):
    (tmp_path / "precious").write_text("mine")
    (sweep.folder / "6" / "attempt-1").mkdir(parents=True)
    (sweep.folder / "6" / "attempt-1" / "manifest.json").symlink_to(tmp_path / "precious")
    bring(results(), sweep)
    assert (tmp_path / "precious").read_text() == "mine"
    assert everything(sweep)["6/attempt-1/manifest.json"] == RUN["6/attempt-1/manifest.json"]


def test_a_closed_part_is_never_replaced_by_another(sweep):
    bring(results(), sweep)
    with pytest.raises(bundle.UserError, match="a closed part differs"):
        bring(results(RUN | {"6/attempt-1/steps/part-000000.parquet": b"lies"}), sweep)
    assert everything(sweep)["6/attempt-1/steps/part-000000.parquet"] == b"rows"


def test_of_what_grows_the_newer_wins_whichever_comes_last(sweep):
    manifest = "6/attempt-1/manifest.json"
    assert bring(results({manifest: b"1"}, made_unix=100), sweep).new == 1
    assert bring(results({manifest: b"2"}, made_unix=200), sweep).new == 1
    late = bring(results({manifest: b"1"}, made_unix=100), sweep)
    assert (late.new, late.older) == (0, 1)
    assert everything(sweep)[manifest] == b"2"


def test_a_journal_that_became_a_part_goes_and_one_that_is_still_there_stays(sweep):
    journals = {f"6/attempt-1/{table}/.journal.arrows": b"open rows" for table in ("steps", "events")}
    bring(results(RUN | journals, made_unix=100), sweep)
    later = {"6/attempt-1/events/.journal.arrows": b"open rows", "6/attempt-1/steps/part-000001.parquet": b"open rows"}
    bring(results(later, made_unix=200), sweep)
    bring(results(RUN | journals, made_unix=100), sweep)
    assert {path for path in everything(sweep) if "journal" in path} == {"6/attempt-1/events/.journal.arrows"}


def test_results_that_were_cut_leave_whole_files_and_no_manifest(sweep):
    content = results({"6/attempt-1/steps/part-000000.parquet": b"r" * 5000, "6/attempt-1/manifest.json": b"{}"})
    with pytest.raises(CutError):
        bring(content[:-1600], sweep)
    assert list(everything(sweep)) == ["sweep.json", "6/attempt-1/steps/part-000000.parquet"]
    with pytest.raises(CutError):
        bring(content[:-4000], sweep)
    assert not list(sweep.folder.rglob("*.tmp"))
    assert bring(content, sweep).kept == 1
