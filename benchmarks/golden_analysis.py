"""Compare what two trees make of the same run directories and datasets: rows, verdicts, warnings and reports.

    python benchmarks/golden_analysis.py inputs INPUTS -- --quick tests/analysis     once
    PYTHONPATH=TREE python benchmarks/golden_analysis.py write INPUTS FOLDER         for each tree, in one environment
    python benchmarks/golden_analysis.py compare FOLDER_A FOLDER_B

`inputs` runs pytest with the arguments after `--` and keeps the run directories of every merge: those of the tests'
builders with their planted defects, and small runs of the workloads. It also makes random mutants of a valid run.
`write` merges each of them, reports the larger ones and each workload, reports the committed datasets of TREE, and
judges their runs again by the samples in them, all with the code of TREE. `compare` prints each difference and exits
with 1 if there is one. Nothing is written into TREE or into INPUTS.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

MAX_INPUT_BYTES = 50_000_000  # limit for one merge: the limits on sizes have tests of their own
MUTANTS = 300
# A report takes seconds. Those of fewer runs of the main workload show nothing that the others do not.
MIN_RUNS_REPORTED, MAIN_WORKLOAD = 4, "finetune_inpaint"
CASE = "case.json"
FRAMES = ("runs.parquet", "windows.parquet", "skipped_files.parquet")
TEXTS = ("error.txt", "report.md", "dataset.json", "verdicts.txt")
VARYING = {"merged_at", "index", "seal"}  # in dataset.json: the time, and what follows from it


def make_inputs(folder: Path, arguments: list[str]) -> int:
    """Keep the run directories of each merge that some tests make, and of random mutants."""
    import pytest

    from analysis import merge
    from tests.analysis import mutations

    original = merge.merge

    def merge_and_keep(roots: list[Path], dataset_dir: Path, **options: Any) -> dict[str, Any]:
        keep(roots, folder, {name: options[name] for name in ("allow_mixed",) if name in options})
        return original(roots, dataset_dir, **options)

    merge.merge = merge_and_keep
    code = int(pytest.main(["-p", "no:cacheprovider", *arguments])) if arguments else 0
    with tempfile.TemporaryDirectory() as scratch:
        for _ in mutations.run_mutations(MUTANTS, folder=Path(scratch)):
            pass
    print(f"{folder}: {len(list(folder.iterdir()))} cases")
    return code


def keep(roots: list[Path], folder: Path, options: dict[str, Any]) -> None:
    """Copy the roots of a merge, once for each content. Pipes and devices stay behind, and so do huge files."""
    plain = {
        path: f"{index}/{path.relative_to(root)}\0"
        for index, root in enumerate(roots)
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }
    if not plain or sum(path.stat().st_size for path in plain) > MAX_INPUT_BYTES:
        return
    digest = hashlib.sha256(json.dumps(options, default=list).encode())
    for path, name in plain.items():
        digest.update(name.encode("utf-8", "surrogateescape") + path.read_bytes())
    case = folder / digest.hexdigest()[:12]
    if case.exists():
        return
    for index, root in enumerate(roots):
        shutil.copytree(root, case / str(index), symlinks=True, ignore=_special)
    (case / CASE).write_text(json.dumps({"roots": len(roots), **options}, default=list))


def _special(folder: str, names: list[str]) -> list[str]:
    known = {stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK}
    return [name for name in names if stat.S_IFMT((Path(folder) / name).lstat().st_mode) not in known]


def write(inputs: Path, out: Path) -> int:
    """Merge and report all inputs, and report the committed datasets, with the code that Python imports."""
    import analysis
    from analysis.merge import merge
    from inpaint_bench.core.errors import UserError

    tree = Path(str(analysis.__file__)).parents[1]
    print(f"with the code of {tree}")
    out.mkdir(parents=True)
    cases = sorted(inputs.iterdir())
    for case in cases:
        options = json.loads((case / CASE).read_text())
        roots = [case / str(index) for index in range(options.pop("roots"))]
        with tempfile.TemporaryDirectory() as scratch:
            dataset = Path(scratch) / "dataset"
            (out / case.name).mkdir()
            try:
                merge(roots, dataset, **options)
            except UserError as error:
                (out / case.name / "error.txt").write_text(f"{error}\n")
                continue
            _keep_dataset(dataset, out / case.name)
            runs = pl.read_parquet(dataset / "runs.parquet", columns=["workload"])
            if runs.height >= MIN_RUNS_REPORTED or set(runs["workload"]) != {MAIN_WORKLOAD}:
                _report(dataset, out / case.name)
    committed = sorted(path.parent for path in (tree / "benchmarks" / "results").glob("*/dataset.json"))
    for dataset in committed:
        (out / dataset.name).mkdir()
        _report(dataset, out / dataset.name)
        _judge(dataset, out / dataset.name)
    print(f"{out}: {len(cases)} merges, {len(committed)} committed datasets")
    return 0


def _judge(folder: Path, out: Path) -> None:
    """Write what the checks say of the completed runs of a committed dataset."""
    from analysis.dataset import open_dataset
    from tests.analysis.committed import contradictions

    dataset = open_dataset(folder)
    runs = dataset.runs.filter(status="completed").sort("run_id").to_dicts()
    lines = [f"{row['run_id']} {row['valid']}: {'; '.join(contradictions(dataset, row))}\n" for row in runs]
    (out / "verdicts.txt").write_text("".join(lines))


def _keep_dataset(dataset: Path, out: Path) -> None:
    for name in FRAMES:
        shutil.copy(dataset / name, out / name)
    metadata = json.loads((dataset / "dataset.json").read_text())
    kept = {name: value for name, value in metadata.items() if name not in VARYING}
    directories = json.loads((dataset / "directories.json").read_text())
    kept["files"] = {file["name"]: file["sha256"] for record in directories for file in record.get("files", [])}
    (out / "dataset.json").write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


def _report(dataset: Path, out: Path) -> None:
    from analysis.report.report import write_report
    from inpaint_bench.core.errors import UserError

    with tempfile.TemporaryDirectory() as scratch:
        try:
            write_report(dataset, Path(scratch) / "report", formats=())
            text = (Path(scratch) / "report" / "report.md").read_text()
        except UserError as error:
            text = f"{error}\n"
    text = re.sub(r"^- Merged: .* UTC from", "- Merged: from", text, flags=re.MULTILINE)
    (out / "report.md").write_text(text.replace(str(dataset), dataset.name))


def compare(old: Path, new: Path) -> int:
    """Print every difference of two outputs."""
    names = sorted({path.name for folder in (old, new) for path in folder.iterdir()})
    differing = 0
    for name in names:
        lines = [line for file in FRAMES for line in _frame_changes(old / name / file, new / name / file)]
        lines += [line for file in TEXTS for line in _text_changes(old / name / file, new / name / file)]
        differing += bool(lines)
        print("\n".join([f"--- {name}", *lines, ""]) if lines else "", end="")
    print(f"{len(names)} compared, {differing} differ")
    return 1 if differing or not list(old.glob("*/report.md")) else 0


def _frame_changes(old: Path, new: Path) -> Iterator[str]:
    if not old.exists() or not new.exists():
        yield from (f"{path.name} is only in {path.parent}" for path in (old, new) if path.exists())
        return
    before, after = pl.read_parquet(old), pl.read_parquet(new)
    yield from (
        f"{old.name}: - {name} {kind}" for name, kind in before.schema.items() if after.schema.get(name) != kind
    )
    yield from (
        f"{old.name}: + {name} {kind}" for name, kind in after.schema.items() if before.schema.get(name) != kind
    )
    if before.height != after.height:
        yield f"{old.name}: {after.height} rows, were {before.height}"
        return
    for name in (name for name in before.columns if name in after.columns):
        for row, (one, other) in enumerate(zip(before[name].to_list(), after[name].to_list(), strict=True)):
            if one != other and not (one != one and other != other):  # both NaN
                yield f"{old.name}: row {row}: {name}\n  - {one!r}\n  + {other!r}"


def _text_changes(old: Path, new: Path) -> Iterator[str]:
    before, after = (path.read_text().splitlines() if path.exists() else [] for path in (old, new))
    yield from list(difflib.unified_diff(before, after, old.name, new.name, lineterm="", n=0))[2:]


def main(arguments: list[str]) -> int:
    """Run the command of the command line."""
    commands = {"inputs": 1, "write": 2, "compare": 2}
    end = arguments.index("--") if "--" in arguments else len(arguments)
    command, folders = "".join(arguments[:1]), [Path(name).resolve() for name in arguments[1:end]]
    if len(folders) != commands.get(command):
        print(__doc__)
        return 2
    if command == "inputs":
        return make_inputs(folders[0], arguments[end + 1 :])
    return write(*folders) if command == "write" else compare(*folders)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
