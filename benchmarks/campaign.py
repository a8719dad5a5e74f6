"""Write docs/campaign.md, the planned and done runs: `python -m benchmarks.campaign [--check | --queue GPU [GPUS]]`.

campaign.tsv is the plan. A line names a cell by columns of runs.parquet; an empty column takes any value. `model` is
the first word of that column, `recipe` means its set of levers, `where` is a condition in SQL (default: valid), and
datasets before `since`, a day or a dataset's name, do not count. Datasets of losses count only if the goal begins with
"losses". `n` runs on `cards` cards of one type are planned, of `minutes` each. --check only tells whether the page is
stale. --queue prints a line for each cell that lacks runs on so many h100 or h200 (default 1), as `queue.sh` takes
them; `shuf` gives a random order, and `photos` and `prepared` have to lie in the root of the repository.
"""

import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import polars as pl

from analysis.stats.cells import RUN_COUNTS
from analysis.units import gpu_label, gpu_order
from inpaint_bench.commands.exit_codes import guarded
from inpaint_bench.core.config.recipe import lever_names
from inpaint_bench.core.console import pluralize
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.paths import ROOT
from inpaint_bench.core.workloads import declarations

from .measured_cells import LOSSES_ENDING, committed_runs
from .results_tables import DASH, LEVERS, Figure, header, row, wrap

PLAN, TARGET = ROOT / "benchmarks" / "campaign.tsv", ROOT / "docs" / "campaign.md"
HEAD = (
    "`python -m benchmarks.campaign` writes this page from [its plan](../benchmarks/campaign.tsv) and the datasets of "
    "`benchmarks/results`. A row has the n valid runs of a type of card with all levers active, from a day on: older "
    "code was slower. With `model.location_tokens=0` runs with position tokens do not count. Cards are different GPUs, "
    "the batch is per GPU, images/s (or volumes) are mean and range. A plan that is "
    "**complete** may have missed its goal (`must`: at least, `aim`: hoped for). A command makes one run of a "
    "row: put in your `gpu=`, repeat it with `seed=1`, `seed=2`, on other cards and in another order. `photos` are "
    "[yours](tutorial_gpu.md#4-your-photographs), `prepared` made of them by `prepare` with `prepare.caches=true`, "
    "once for each `model=` and `model.dtype=`."
)
KEYS = ("workload", "model", "batch", "gpus", "resolution_px")
SHOWN = ("row", "cell", "plan", "done", "images/s", "J/image", "missing", "datasets")
NO_TOKENS = "model.location_tokens=0"
NUMBER = r"[1-9]\d*"
SPELLED = {  # how a line of the plan spells a value; another one would only never find a run
    "workload": "|".join(declarations()),
    "batch": f"auto|{NUMBER}|",
    **dict.fromkeys(("gpus", "resolution_px"), f"{NUMBER}|"),
    "since": r"\d{4}-\d\d-\d\d[\w-]*|",
    **dict.fromkeys(("n", "cards"), NUMBER),
    "minutes": r"\d+(\.\d+)?",
}
Line = dict[str, Any]  # a line of the plan


def read_plan() -> list[Line]:
    """Read the plan. Raises PolarsError if a column is missing, UserError for a value that is none."""
    plan = pl.read_csv(PLAN, separator="\t", quote_char=None, infer_schema=False).fill_null("")
    for name, pattern in SPELLED.items():
        if wrong := plan.filter(~pl.col(name).str.contains(f"^({pattern})$"))[name].to_list():
            raise UserError(f"{PLAN}: {name}={wrong[0]}: must match {pattern}")
    numbers = pl.col("n", "cards").cast(pl.Int64), pl.col("minutes").cast(pl.Float64)
    return plan.select("part", *KEYS, "recipe", "where", "since", "goal", "command", *numbers).to_dicts()


def read_runs() -> pl.DataFrame:
    """Read the runs of all datasets, with their keys as the plan spells them."""
    tables = [runs.with_columns(dataset=pl.lit(name)) for name, runs in committed_runs()]
    batch = pl.coalesce("batch_requested", pl.col("batch").cast(pl.String)).alias("batch")
    texts = [pl.col("model").str.extract(r"^(\w+)"), batch, pl.col("gpus", "resolution_px").cast(pl.String)]
    texts += [LEVERS.list.sort().list.join("+").alias("levers")]
    return pl.concat(tables, how="diagonal_relaxed").with_columns(texts)


def select(line: Line, runs: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """Return the runs of a cell by type of card. Raises PolarsError for a wrong condition."""
    tests = [pl.col(key) == line[key] for key in KEYS if line[key]]
    tests += [pl.col("levers") == "+".join(sorted(lever_names(line["recipe"])))] if line["recipe"] else []
    # A run with position tokens does other work; where the model has none, the command does not say so.
    tests += [pl.col("overrides").str.contains(NO_TOKENS, literal=True)] if NO_TOKENS in line["command"] else []
    tests += [pl.col("dataset").str.ends_with(LOSSES_ENDING) == line["goal"].startswith("losses")]
    matching = runs.filter(*tests, pl.col("dataset") >= line["since"], pl.sql_expr(line["where"] or "valid"))
    return {gpu: matching.filter(gpu=gpu) for gpu in sorted(matching["gpu"].unique(), key=gpu_order)} or {
        DASH: matching
    }


def missing(line: Line, same: pl.DataFrame) -> tuple[int, int]:
    """Return how many runs and how many cards the runs of a cell, which are of one type of card, lack."""
    return max(0, line["n"] - same.height), max(0, line["cards"] - same.select(RUN_COUNTS["cards"]).item())


def queue(gpu: str, gpus: str = "1") -> Iterator[str]:
    """Yield name and arguments of a run on so many cards of this type, for each cell of them that lacks one."""
    runs = read_runs().filter(gpu=gpu)
    numbers: Counter[str] = Counter()
    for line in read_plan():
        numbers[line["part"]] += 1
        own = next(iter(select(line, runs).values()))
        arguments = line["command"].partition("gpu=h200 ")[2]
        if any(missing(line, own)) and (line["gpus"] or "1") == gpus:
            yield f"{line['part'].split()[0].lower()}-{numbers[line['part']]} {arguments}"


def rows(line: Line, runs: pl.DataFrame) -> tuple[float, list[str]]:
    """Return the minutes that a cell's missing runs take, and its row of each type of card."""
    keys = {"batch": "batch {}", "gpus": "GPUs {}", "resolution_px": "{} px", "since": "from {}", "minutes": "{:g} min"}
    facts = [form.format(line[key]) for key, form in keys.items() if line[key]]
    cell = f"{line['model'] or line['workload']} `{line['recipe']}`, {', '.join(facts)}"
    plan = f"{pluralize(line['n'], 'run')} on {pluralize(line['cards'], 'card')}; {line['goal']}".removesuffix("; ")
    left, texts = [], []
    for gpu, same in select(line, runs).items():
        cards = same.select(RUN_COUNTS["cards"]).item()
        lacks = dict(zip(("more run", "more card"), missing(line, same), strict=True))
        left.append(max(lacks["more run"], -(-lacks["more card"] // int(line["gpus"] or 1))))
        lacking = ", ".join(pluralize(number, noun) for noun, number in lacks.items() if number) or "**complete**"
        digits = 4 if line["workload"] == "volume3d_sample" else 2  # a volume takes many seconds
        means = [Figure("", name, digits).mean_text(same) for name in ("images_per_s", "joules_per_image")]
        done = f"{gpu_label(gpu)}: n = {same.height}, {pluralize(cards, 'card')}" if same.height else DASH
        texts.append(row([cell, plan, done, *means, lacking, ", ".join(same["dataset"].unique().sort())]))
    return line["minutes"] * min(left), texts


def page() -> str:
    """Return the page as Markdown. Raises UserError for a plan that is none."""
    runs, parts = read_runs(), defaultdict[str, list[tuple[str, float, list[str]]]](list)
    try:
        for line in read_plan():
            parts[line["part"]].append((line["command"], *rows(line, runs)))
    except pl.exceptions.PolarsError as error:
        raise UserError(f"{PLAN}: {str(error).splitlines()[0]}") from error
    lines = [f"# Planned and done runs\n\n{wrap(HEAD)}\n"]
    for part, cells in parts.items():
        done, minutes = sum(not left for _, left, _ in cells), sum(left for _, left, _ in cells)
        takes = f"{minutes / 60:.1f} hours" if minutes >= 60 else f"{minutes:g} minutes"
        text = f"{done} of {pluralize(len(cells), 'cell')} complete; the missing runs take {takes}."
        table = [f"| {number} {text}" for number, (_, _, texts) in enumerate(cells, 1) for text in texts]
        commands = [f"{number}. `{command}`" for number, (command, *_) in enumerate(cells, 1)]
        lines += [f"## {part}\n\n{text}\n", *header(SHOWN), *table, "", *commands, ""]
    return "\n".join(lines)


def main() -> int:
    match sys.argv[1:]:
        case ["--queue", "h100" | "h200" as gpu, *gpus] if gpus in ([], ["1"], ["2"], ["4"]):
            print(*queue(gpu, *gpus), sep="\n")
        case ["--check"]:
            if TARGET.read_text(encoding="utf-8") != page():
                raise UserError(f"{TARGET}: is stale, run python -m benchmarks.campaign")
        case []:
            TARGET.write_text(page(), encoding="utf-8")
        case other:
            raise UserError(f"{shlex.join(other)}: no such option; there are --check, and --queue h100|h200 [1|2|4]")
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
