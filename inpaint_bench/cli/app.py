"""The `inpaint-bench` command: signatures and help texts of its verbs.

A verb is declared here, and run by a module of this folder that is imported only when the verb is used, so that
`--help` and completion stay fast. Errors and exit codes are in commands/exit_codes.py.
"""

import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option
from typer.core import TyperGroup

from inpaint_bench.commands.exit_codes import guarded, print_error, refuse_paths, unwind_on_signals, usage_error
from inpaint_bench.core import __version__
from inpaint_bench.core.errors import UserError

PROGRAM = "inpaint-bench"
# No markup mode: help texts have square brackets, which rich would read as markup.
_STYLE: dict[str, Any] = {"context_settings": {"help_option_names": ["-h", "--help"]}, "rich_markup_mode": None}


class _Guarded(TyperGroup):
    """A group whose verbs end with the exit codes of `guarded`."""

    def invoke(self, ctx: Any) -> Any:
        # super() without arguments fails in a lambda, which has no first argument.
        return guarded(lambda: super(_Guarded, self).invoke(ctx))


app = typer.Typer(cls=_Guarded, help="Benchmark fine-tuning of diffusion models across GPUs and Slurm sites.", **_STYLE)
doctor = typer.Typer(help="Check this machine, a site file or a GPU.", **_STYLE)
# Hydra parses the arguments of `launch`, its --help included.
_HYDRA = {"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []}

Sweep = Annotated[Path, Argument(metavar="SWEEP", help="Sweep directory, as `launch -m` printed it.")]
Output = Annotated[Path, Option("-o", "--output", metavar="DIR", help="Folder to write; older output is replaced.")]
Overrides = Annotated[list[str] | None, Argument(metavar="KEY=VALUE", help="Configuration, as for launch.")]
ConfigDir = Annotated[
    Path | None,
    Option(metavar="DIR", exists=True, file_okay=False, help="Folder with files of your own, such as site/mine.yaml."),
]


def _examples(*arguments: str) -> str:
    """Return the epilog of a verb's help: complete commands."""
    # click does not rewrap a paragraph that begins with "\b".
    return "\n".join(["\b", "Examples:", *(f"  {PROGRAM} {line}" for line in arguments)])


def _verb(
    module: str, *shown: str, group: typer.Typer = app, unwinds: bool = False, **settings: Any
) -> Callable[[Callable[..., None]], Callable[..., Any]]:
    """Declare a verb by the parameters and the docstring of a function, with the examples `shown` in its help.

    `run_<verb>` of a module of this folder runs it, with these parameters. `unwinds`: it removes its partial output
    if a signal ends it.
    """

    def declare(declaration: Callable[..., None]) -> Callable[..., Any]:
        @wraps(declaration)
        def run(**parameters: Any) -> Any:
            with unwind_on_signals() if unwinds else nullcontext():
                function = getattr(importlib.import_module(f".{module}", __package__), f"run_{declaration.__name__}")
                return function(**parameters)

        return group.command(epilog=_examples(*shown) if shown else None, **settings)(run)

    return declare


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code of the process."""
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        refuse_paths(arguments)
        # Not standalone: usage errors are raised instead of printed, and the exit code of the verb is returned.
        code = _command.main(arguments, prog_name=PROGRAM, standalone_mode=False)
    except typer.TyperException as error:  # a wrong verb, option or value
        print_error(usage_error(error, PROGRAM))
        return UserError.exit_code
    except UserError as error:
        print_error(str(error))
        return error.exit_code
    return int(code or 0)


def _print_version(requested: bool) -> None:
    if requested:
        from inpaint_bench.core.environment import git_state
        from inpaint_bench.core.paths import ROOT

        state = git_state(ROOT) or {}
        changed = ", changed" if state.get("dirty") else ""
        commit = f"commit {state['commit'][:12]}{changed}" if state.get("commit") else "commit not known"
        print(f"{PROGRAM} {__version__} ({commit})")
        raise typer.Exit


@app.callback(epilog=_examples("launch -m gpu=a40,a100,h200 batch=8,16,32"))
def _before_every_verb(
    ctx: typer.Context,
    version: Annotated[
        bool, Option("--version", callback=_print_version, help="Print version and commit, and exit.")
    ] = False,
    quiet: Annotated[bool, Option("-q", "--quiet", help="Print results, warnings and errors only.")] = False,
) -> None:
    if ctx.invoked_subcommand != "launch":  # Hydra sets up its logging
        level = logging.WARNING if quiet else logging.INFO
        # The output of `watch` is that of the program it runs.
        stream = sys.stderr if ctx.invoked_subcommand == "watch" else sys.stdout
        logging.basicConfig(level=level, format="%(message)s", stream=stream)
        if quiet:
            from inpaint_bench.core.console import output

            output.quiet = True
    elif quiet:
        raise UserError("-q: write it after launch, as in `inpaint-bench launch -q -m ...`")


@_verb(
    "prepare",
    "prepare data=synthetic data.num_images=6500 prepare.out=facades",
    "prepare data=folder data.root=photos prepare.out=prepared prepare.formats=[files,memmap,hdf5]",
    "prepare data=prepared data.root=prepared prepare.formats=[webdataset]",
    "prepare workload=volume3d_train workload.volumes=8 prepare.out=volumes",
    unwinds=True,
)
def prepare(
    overrides: Overrides = None,
    verify: Annotated[Path | None, Option(metavar="DIR", help="Only compare the files of DIR with checksums.")] = None,
) -> None:
    """Prepare a dataset from a folder of images or the generator.

    Writes prepare.out with a manifest, checksums and a split by geographic blocks. Run it again to add formats. The
    keys are those of data, data.* and prepare.*; prepare.caches=true also needs a model and a recipe. With
    workload=volume3d_train it writes synthetic labelled volumes as NIfTI files, in the shape of that network.
    """


def _complete_launch(incomplete: str) -> list[str]:
    from inpaint_bench.commands.launch_arguments import complete

    # bash breaks words at "=", and click drops the words before the last one.
    words, number = os.environ.get("COMP_WORDS", "").split(), os.environ.get("COMP_CWORD", "")
    return complete(words[: int(number)], (*words, "")[int(number)]) if number.isdecimal() else complete([], incomplete)


@app.command(context_settings=_HYDRA, add_help_option=False)
def launch(arguments: Annotated[list[str] | None, Argument(autocompletion=_complete_launch)] = None) -> int:
    """Submit a sweep to every site (-m), or run one point here."""
    from inpaint_bench import launch

    return launch.main(arguments or [])


@_verb("status", "status", "status runs/2026-11-21/08-30-00-123456-inpaint")
def status(
    sweep: Annotated[
        Path | None, Argument(metavar="SWEEP", help="Sweep directory; without one the latest below runs are listed.")
    ] = None,
    watch: Annotated[bool, Option("--watch", help="Refresh until all points have finished.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print JSON instead of a table.")] = False,
    point: Annotated[int | None, Option(metavar="N", help="Show one point: attempts, logs, messages.")] = None,
    all_points: Annotated[bool, Option("--all", help="Show every point in a row of its own.")] = False,
    every_s: Annotated[float | None, Option("--every", metavar="S", help="Seconds between two refreshes.")] = None,
    stages: Annotated[bool, Option("--stages", help="Show the seconds of each stage of the runs.")] = False,
) -> None:
    """Show the state of every point of a sweep.

    The exit code is 3 while points are queued or running; else 4 if the state of a point is unknown; else 1 if a point
    failed or was never submitted; else 0. 2 is a wrong command or directory.
    """


@_verb("sweeps", "rerun runs/2026-11-21/08-30-00-123456-inpaint time_min=120 --only timeout")
def rerun(
    sweep: Sweep,
    changes: Annotated[list[str] | None, Argument(metavar="KEY=VALUE", help="Overrides for this rerun.")] = None,
    only: Annotated[str | None, Option(metavar="REASONS", help="Rerun only these failure reasons (by commas).")] = None,
    repeats: Annotated[str | None, Option(metavar="N|auto", help="Add replicates instead, up to N per cell.")] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Show what would be submitted, submit nothing.")] = False,
    wait: Annotated[bool, Option("--wait", help="Return when all points have finished.")] = False,
    as_json: Annotated[bool, Option("--json", help="With --dry-run: print JSON instead of tables.")] = False,
) -> None:
    """Resubmit the points of a sweep that did not complete.

    The keys rerun.* say what happens for each failure reason: timeouts get a longer limit, failed nodes are excluded;
    application errors and exhausted memory (oom) are resubmitted only if --only names them. With --repeats auto,
    replicates are added until the interval of images/s is within repeats_target.
    """


@_verb("sweeps", "cancel runs/2026-11-21/08-30-00-123456-inpaint")
def cancel(
    sweep: Sweep,
    point: Annotated[list[int] | None, Option(metavar="N", help="Only this point; may be repeated.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON: the problems, a sentence each.")] = False,
) -> None:
    """Cancel the queued and running points of a sweep.

    With --point only those named, also in a job that runs several.
    """


@_verb("sweeps", "collect runs/2026-11-21/08-30-00-123456-inpaint")
def collect(sweep: Sweep) -> None:
    """Copy results of other sites into the sweep directory.

    They come over ssh. An interrupted transfer is resumed. An attempt that contradicts the sweep's record is left out
    and listed (exit code 1).
    """


@_verb("datasets", "merge runs/grace runs/delta -o dataset", unwinds=True)
def merge(
    roots: Annotated[
        list[Path],
        Argument(metavar="ROOT", exists=True, file_okay=False, help="Folders with run directories at any depth."),
    ],
    output: Output,
    threads: Annotated[int | None, Option(metavar="N", help="Run directories to read at once.")] = None,
    allow_mixed: Annotated[str, Option(metavar="ATTRIBUTES", help="Keep runs that differ in these apart.")] = "",
    as_json: Annotated[bool, Option("--json", help="Print JSON instead of sentences.")] = False,
) -> None:
    """Merge run directories of all sites into one dataset.

    Inputs are only read, and everything left out is listed with its reason. Runs of one GPU at one site that differ in
    driver, board, power_limit or power_semantics are refused; --allow-mixed with these names, by commas, keeps them as
    separate cells.
    """


@_verb("datasets", "report dataset -o report", "report benchmarks/results -o report")
def report(
    dataset: Annotated[
        Path,
        Argument(
            metavar="DATASET",
            exists=True,
            file_okay=False,
            help="Folder that `merge` wrote, or a folder of such folders.",
        ),
    ],
    output: Output,
    export: Annotated[str, Option(metavar="FORMATS", help="csv, latex, pdf, png, by commas; or all, none.")] = (
        "csv,latex,pdf"
    ),
    accept_disagreement: Annotated[
        bool, Option("--accept-disagreement", help="Show means of cells whose runs disagree.")
    ] = False,
    compare: Annotated[
        Path | None, Option(metavar="OLD", help="Add a section that compares the dataset with this one.")
    ] = None,
    figures: Annotated[
        Path | None, Option(metavar="FOLDER", help="Write the leading figures for a paper: 84 mm wide, 8 pt, PDF, SVG.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Print a dataset's answers and write the report.

    Writes report.html (one offline page), report.md, runs.csv, every table as tables/*.csv and *.tex (booktabs) and
    every figure as figures/*.svg and *.pdf. A folder of datasets gets a report of each, and index.html with a row each.
    """


@_verb("datasets", "compare before after", "compare before after --fail-on 3%", "compare dataset --gpu h100,h200")
def compare(
    old: Annotated[Path, Argument(metavar="OLD", help="Folder that `merge` wrote, to compare with.")],
    new: Annotated[
        Path | None, Argument(metavar="[NEW]", help="Folder that `merge` wrote; with --gpu OLD by default.")
    ] = None,
    gpu: Annotated[
        str | None,
        Option(metavar="OLD,NEW", help="Compare these two GPUs, the first in OLD with the second in NEW: h100,h200."),
    ] = None,
    fail_on: Annotated[
        str | None,
        Option(
            metavar="PERCENT",
            help="Exit code 1 if a cell is worse by more, in images/s or J/image, or has no valid run in NEW.",
        ),
    ] = None,
    junit: Annotated[
        Path | None, Option(metavar="FILE", help="With --fail-on: write JUnit XML, with a test case per cell.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Compare two datasets, cell by cell.

    Cells that do the same work stand side by side, with what differs in their environments. A cell is worse if the
    whole 95 % interval of the change is, or the change itself if there are too few runs. `report NEW --compare OLD`
    writes the same tables into the page.
    """


@_verb("advise", "advise model=sd15_inpaint images=6500 epochs=16 deadline_h=4 budget_su=20")
def advise(
    wishes: Annotated[list[str], Argument(metavar="KEY=VALUE", help="What to train, and limits: see below.")],
    datasets: Annotated[
        list[Path] | None, Option(metavar="DATASET", help="A dataset of your own to use too; may be repeated.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON instead of sentences.")] = False,
) -> None:
    """Say which site, GPU, batch and recipe to train with.

    Needs model, images and epochs. Limits are deadline_h and one of budget_su, budget_usd and budget_gpu_h; batch, px,
    recipe, gpu, gpus and site narrow the choice. Prints the fastest, the cheapest and the option of least energy, each
    with its interval, where the rate is from, and the command. The exit code is 1 if no option keeps to the limits.
    """


def _complete_lever(incomplete: str) -> list[str]:
    from inpaint_bench.core.config.recipe import choices

    return [name for name in choices() if name.startswith(incomplete)]


@_verb("levers", "levers", "levers tf32", "levers dataset --json")
def levers(
    words: Annotated[
        list[str] | None,
        Argument(
            metavar="NAME|DATASET", help="Levers to show, folders that `merge` wrote.", autocompletion=_complete_lever
        ),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the levers, or show what one sets and needs.

    Also says where a lever was seen to help: in the studies of the datasets, else in the measurements of this checkout.
    """


@_verb("restore", "restore runs/trained/weights photos -o restored --masks photos/masks --device cuda", unwinds=True)
def restore(
    weights: Annotated[Path, Argument(metavar="WEIGHTS", help="Diffusers folder, as training saves it.")],
    images: Annotated[Path, Argument(metavar="IMAGES", help="Folder of images.")],
    output: Output,
    masks: Annotated[Path | None, Option(metavar="DIR", help="Masks with the images' names, white = repaint.")] = None,
    mask_kind: Annotated[Literal["sd", "disaster"], Option(help="Kind of the generated masks.")] = "sd",
    steps: Annotated[int, Option(min=1, help="DDIM steps.")] = 30,
    seed: Annotated[int, Option(min=0, help="Seed of noise and generated masks.")] = 0,
    device: Annotated[Literal["cpu", "cuda"], Option(help="Device to run on.")] = "cpu",
) -> None:
    """Repaint the masked parts of images with saved weights.

    Images below the folder are cropped to their centre square and resized as in training. Positions come from a
    metadata file or EXIF; an image without one is restored with the learned "unknown position" tokens. Without --masks,
    masks are those of the metadata file, or generated. restore.json lists what was done.
    """


@_verb(
    "watch",
    "watch -o run -- python train.py --epochs 1",
    "watch --name sdxl-lora --images 4000 -- accelerate launch train.py",
    "watch -o run --attach 4711",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
def watch(
    command: Annotated[
        list[str] | None, Argument(metavar="COMMAND...", help="Program and its arguments, after --.")
    ] = None,
    attach: Annotated[
        int | None, Option(metavar="PID", min=1, help="Measure this process of yours on this node, from now on.")
    ] = None,
    output: Annotated[
        Path | None, Option("-o", "--output", metavar="DIR", help="Run directory to write. [default: runs/RUN-ID]")
    ] = None,
    name: Annotated[
        str | None, Option(metavar="NAME", help="Runs of one name are replicates. [default: those of equal commands]")
    ] = None,
    images: Annotated[
        int | None, Option(metavar="N", min=1, help="Images that the command processes; gives images/s and J/image.")
    ] = None,
    site: Annotated[str | None, Option(metavar="SITE", help="Name of the site. [default: by host and cluster]")] = None,
    gpus: Annotated[
        str | None, Option(metavar="GPU-...,...", help="GPUs to sample. [default: CUDA_VISIBLE_DEVICES, else all]")
    ] = None,
    telemetry: Annotated[Literal["nvml", "replay", "none"], Option(help="What is sampled.")] = "nvml",
    capture: Annotated[str | None, Option(metavar="NAME", help="Recording for --telemetry replay.")] = None,
    hz: Annotated[float, Option(metavar="HZ", help="Samples of power and utilisation per second.")] = 10.0,
    track: Annotated[
        str | None, Option(metavar="NAME", help="Tracker for curves over seconds: tensorboard, wandb or mlflow.")
    ] = None,
) -> None:
    """Run any program beside the telemetry sidecar.

    Leaves a run directory that merge and report take: power, energy, utilisation, memory, clocks and duration. The
    program is not changed; its output and its exit code are those of this command, and it gets the signals. The command
    line is recorded. In a job: srun --ntasks=1 inpaint-bench watch -- COMMAND. With --attach a program is measured that
    runs already, until it ends or Ctrl-C.
    """


@doctor.callback(invoke_without_command=True)
def _machine_by_default(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        machine(overrides=None, config_dir=None)


@_verb("doctor", group=doctor)
def machine(overrides: Overrides = None, config_dir: ConfigDir = None) -> None:
    """List this machine's software, GPUs and reachable sites."""


@_verb("doctor", "doctor site delta --write", group=doctor, unwinds=True)
def site(
    site: Annotated[str, Argument(metavar="NAME|all", help="Name of the site file, or all of them.")],
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    write: Annotated[bool, Option("--write", help="Write the corrections into the site file.")] = False,
) -> None:
    """Compare a site file with its live Slurm.

    Prints the corrections; --write also dates the checked blocks. The exit code is 1 if something differs.
    """


@_verb("doctor", "doctor gpu --out card.json.gz", group=doctor, unwinds=True)
def gpu(
    uuid: Annotated[str | None, Option(metavar="GPU-...", help="Which GPU, if there are several.")] = None,
    seconds: Annotated[float, Option(metavar="S", help="Length of the examination.")] = 20.0,
    out: Annotated[Path | None, Option(metavar="FILE.json.gz", help="Save a recording for telemetry=replay.")] = None,
    note: Annotated[str, Option(help="What the GPU was doing, kept in the recording.")] = "",
) -> None:
    """Examine a GPU through NVML.

    Prints which values it supports, how often they change and what a call costs. Only reads, and needs no root. Where
    there are several GPUs and none is named, it prints how they are linked, and how fast an all-reduce of them is.
    """


app.add_typer(doctor, name="doctor", epilog=_examples("doctor site delta --write"))


@_verb("new", "new site mine", "new site mine --config-dir my", "new gpu rtx4090")
def new(
    kind: Annotated[Literal["site", "gpu"], Argument(metavar="site|gpu", help="A Slurm cluster, or a GPU model.")],
    name: Annotated[str, Argument(metavar="NAME", help="Its name, as in site=NAME and gpu=NAME.")],
    config_dir: ConfigDir = None,
) -> None:
    """Write the first file of a site or a GPU, to edit.

    It goes into --config-dir, or into conf. A site is filled with what Slurm reports on a login node, a GPU with what
    NVML reports on a machine that has it. What is left to be typed is marked ???, and refused until it is typed.
    """


_command: Any = typer.main.get_command(app)
