"""`advise`: which site, card, batch and recipe, from measured and published rates. Loads no torch."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any

from analysis import site_rates
from inpaint_bench.core.config import recipe as recipes
from inpaint_bench.core.config.bench import TimeoutPolicy
from inpaint_bench.core.config.site import CHOSEN
from inpaint_bench.core.config.user_file import read_user_file, user_file
from inpaint_bench.core.config.validation import did_you_mean
from inpaint_bench.core.config.yaml_file import read_config_file
from inpaint_bench.core.console import echo, echo_json, list_some, shell_command
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.estimates import memory, rates
from inpaint_bench.core.estimates.rates import Interval, amount, scaled
from inpaint_bench.core.paths import conf_dir
from inpaint_bench.core.recipe_names import split_choices
from inpaint_bench.core.workloads.finetune_inpaint import GRAPH_WARMUP

WHOLE = ("images", "batch", "px", "gpus")
NUMBERS = (*WHOLE, "epochs", "deadline_h", "budget_su", "budget_usd", "budget_gpu_h")
KEYS = ("model", *NUMBERS, "recipe", "gpu", "site")
BUDGETS = {"budget_su": ("service_units", "SU"), "budget_usd": ("usd", "USD"), "budget_gpu_h": ("gpu_hours", "GPU-h")}


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to train, with what it takes. Memory is GiB."""

    site: str
    gpu: str
    gpus: int
    batch: int
    recipe: str
    hours: Interval
    gpu_hours: Interval
    service_units: Interval | None
    usd: Interval | None
    joules: Interval | None
    gco2: Interval | None
    memory_gib: float | None
    source: str
    command: str

    def cost(self, name: str, end: int = 0) -> float:
        """Return the expected cost, or the least or most; infinite if it is not known."""
        values: Interval | None = getattr(self, name)
        return values[end] if values else math.inf

    @property
    def adapters(self) -> bool:
        """Return whether LoRA's adapters are trained instead of all weights."""
        return bool(recipes.fields_of(self.recipe).get("lora_rank"))

    def __str__(self) -> str:
        cards, each = (f"{self.gpus} x {self.gpu}", " per GPU") if self.gpus > 1 else (self.gpu, "")
        adapters = " (adapters)" if self.adapters else ""
        return f"{cards} at {self.site}, recipe {self.recipe}{adapters}, batch {self.batch}{each}"

    def lines(self) -> Iterator[str]:
        """Yield the option as text."""
        yield f"    {self}" + (f", {self.memory_gib:.1f} GiB" if self.memory_gib else "")
        charge = site_rates.rate(self.site, self.gpu)
        takes: dict[str, Interval | None] = {"h": self.hours, "GPU-h": self.gpu_hours}
        if self.service_units:
            takes |= {f"{charge.unit} at most" if charge.at_most else charge.unit: self.service_units, "USD": self.usd}
        takes |= {"MJ": self.joules and scaled(self.joules, 1e-6), "kg of CO2": self.gco2 and scaled(self.gco2, 1e-3)}
        listed = ", ".join(amount(values, unit) for unit, values in takes.items() if values)
        yield f"    {listed}" + ("" if self.joules else ", energy not known")
        yield f"    {self.source}"
        yield f"    {self.command}"


def run_advise(wishes: Sequence[str], *, datasets: Sequence[Path] | None, as_json: bool) -> int:
    """Print the fastest, the cheapest and the option of least energy; or what would make one feasible, and return 1.

    For a card that the user names, print the fastest published one too.
    """
    wish, path = _parse(wishes), user_file()
    user = read_user_file(path) if path else {}
    named = user.get("datasets") or ()
    cells = rates.own_cells([*(datasets or ()), *([named] if isinstance(named, str) else named)])
    options = list(_options(wish, cells, user))
    if not options:
        raise UserError(_nothing(wish, cells, user))
    key = next((key for key in BUDGETS if key in wish), "budget_gpu_h")
    (budget, unit), limit, deadline = BUDGETS[key], wish.get(key, math.inf), wish.get("deadline_h", math.inf)
    if all(math.isinf(option.cost(budget)) for option in options):
        how = "; set sites.<site>.charging.price_per_unit in your own file" if budget == "usd" else ""
        raise UserError(f"{key}: no site has {unit} for these options{how}")
    limits = {"hours": (deadline, "h"), budget: (limit, unit)}
    wanted = " and ".join(f"{most:g} {unit}" for most, unit in limits.values() if most < math.inf)
    feasible = [o for o in options if all(o.cost(name) <= most for name, (most, _) in limits.items())]
    # Published hours hold no start, so that of a small training they would be the least.
    timed = [o for o in feasible if not o.source.startswith("published")] or feasible
    orders = {
        "fastest": ("hours", timed),
        "cheapest": (budget, timed),
        "least energy": ("joules", [option for option in feasible if option.joules]),
        "all weights": ("hours", [o for o in timed if not o.adapters]),
        "published": ("hours", [o for o in feasible if "gpu" in wish and o.source.startswith("published")]),
    }
    chosen = {name: min(fit, key=methodcaller("cost", order)) for name, (order, fit) in orders.items() if fit}
    if "fastest" in chosen and not chosen["fastest"].adapters:
        chosen.pop("all weights", None)
    tied = {name: _tied(chosen[name], *orders[name]) for name in chosen}
    otherwise = [] if feasible else list(_otherwise(options, limits))
    if as_json:
        named = {name: asdict(option) for name, option in chosen.items()}
        ties = {name: list(map(asdict, others)) for name, others in tied.items()}
        echo_json({"wishes": wish, "feasible": bool(feasible), "options": named, "tied": ties, "otherwise": otherwise})
    elif feasible:
        for option in dict.fromkeys(chosen.values()):
            best = [name for name in chosen if chosen[name] == option]
            headings = (f"cheapest in {unit}" if name == "cheapest" else name for name in best)
            echo(f"{', '.join(headings)}:", *option.lines())
            by_tie: dict[str, list[str]] = {}
            for name in best:
                by_tie.setdefault(list_some(list(map(str, tied[name]))), []).append(name)
            for others, in_these in by_tie.items():
                if others:
                    echo(f"    {', '.join(in_these)}: a tie with {others}")
            if any(option.cost(name, 2) > most for name, (most, _) in limits.items()):
                echo(f"    the upper end of an interval exceeds {wanted}")
        if "least energy" in chosen and not all(option.joules for option in feasible):
            echo("Least energy is that of the options whose energy is known: nobody published ratios of energy.")
        echo("Expected values, with the interval in parentheses. A service unit of one site is not that of another.")
        if any(tied.values()):
            echo("A tie: the expected value of the other lies within the interval of this one.")
    else:
        echo(f"No option keeps to {wanted}.", *(f"    {line}" for line in otherwise))
    return 0 if feasible else 1


def _tied(option: Option, name: str, others: Sequence[Option]) -> list[Option]:
    """Return the other options that are not worse by more than the interval of this one, which is the best."""
    tied = [other for other in others if other != option and other.cost(name) <= option.cost(name, 2) < math.inf]
    return sorted(tied, key=methodcaller("cost", name))


def _parse(wishes: Sequence[str]) -> dict[str, Any]:
    """Return the wishes by key. Raises UserError for what cannot be used."""
    wish: dict[str, Any] = {}
    for text in wishes:
        key, equals, value = text.partition("=")
        if key not in KEYS:
            raise UserError(f"{text}: no such key.{did_you_mean(key, KEYS)} advise takes {', '.join(KEYS)}")
        if key in wish:
            raise UserError(f"{key}: is given twice")
        wish[key] = value
        if key in NUMBERS:
            try:
                wish[key] = number = int(value) if key in WHOLE and value.isdecimal() else float(value)
            except ValueError:
                number = math.nan
            if not 0 < number < math.inf or (key in WHOLE and number != int(number)):
                raise UserError(f"{key}{equals}{value}: must be a {'whole ' if key in WHOLE else ''}number above 0")
        elif not value:
            raise UserError(f"{key}=: is empty; name one")
    wish |= {key: int(wish[key]) for key in WHOLE if key in wish}
    if "recipe" in wish:
        wish["recipe"] = _recipe(wish["recipe"])
    if missing := [key for key in ("model", "images", "epochs") if key not in wish]:
        raise UserError(f"{', '.join(missing)}: missing; such as model=sd15_inpaint images=6500 epochs=16 deadline_h=4")
    if len(given := [key for key in BUDGETS if key in wish]) > 1:
        raise UserError(f"{' and '.join(given)}: give one budget")
    for key in ("model", "gpu", "site"):
        names = sorted(path.stem for path in (conf_dir() / key).glob("*.yaml") if path.stem not in CHOSEN)
        if key in wish and wish[key] not in names:
            guess = did_you_mean(wish[key], names)
            raise UserError(f"{key}={wish[key]}: no such {key}.{guess} Known are {', '.join(names)}")
    return wish


def _recipe(text: str) -> str:
    """Return a recipe that is spelled as for `launch`: `a+b`, `[a,b]`. Raises UserError for none, and for several."""
    text = text.strip("'\" ")
    if text.count("[") != text.count("]") or ("," in text and "[" not in text):
        raise UserError(f"recipe={text}: give one recipe; [a,b] and a+b are recipes of two levers")
    name = "+".join(recipes.requested_parts(split_choices([f"recipe={text}"])))
    recipes.lever_names(name)  # raises for an unknown one
    return name


def _options(
    wish: dict[str, Any], cells: Sequence[rates.Cell], user: dict[str, Any], *, any_length: bool = False
) -> Iterator[Option]:
    """Yield every option whose rate is known, and whose memory suffices as far as that is known.

    A training that one start of a job cannot finish is an option where jobs requeue themselves, or for `any_length`.
    """
    known = [
        cell for cell in cells
        if (cell.work.model, cell.work.resolution_px, cell.nodes) == (wish["model"], wish.get("px", 512), 1)
        and cell.work.workload in memory.WORKLOADS and not cell.work.variant
    ]  # fmt: skip
    wanted = {cell.work.recipe for cell in known if _is_wanted(cell.work.recipe, wish.get("recipe"))}
    wanted = wanted & {wish.get("recipe")} or wanted  # if two recipes have the same levers, the one that was given
    shapes = {
        (cell.work, cell.gpus, wish.get("batch", cell.batch)) for cell in known
        if cell.gpus == wish.get("gpus", cell.gpus) and cell.work.recipe in wanted
    }  # fmt: skip
    sites = [path.stem for path in sorted((conf_dir() / "site").glob("*.yaml")) if path.stem not in (*CHOSEN, "local")]
    for site in sites if "site" not in wish else [wish["site"]]:
        content = read_config_file(conf_dir() / "site" / f"{site}.yaml", "site")
        prefix = f"sites.{site}."
        own = {key.removeprefix(prefix): value for key, value in user.items() if key.startswith(prefix)}
        grid = own.get("grid_gco2_per_kwh", content.get("grid_gco2_per_kwh"))
        is_slurm = content.get("connect", {}).get("method") != "local"
        image = content.get("environment", {}).get("container", {}).get("image")
        has_scontrol = not own.get("environment.container.image", image)
        requeues = any_length or (content.get("requeue", {}).get("request") and has_scontrol)
        for gpu in sorted(content.get("gpus", {}).keys() & ({wish["gpu"]} if "gpu" in wish else rates.cards().keys())):
            entry, charge = content["gpus"][gpu], site_rates.rate(site, gpu)
            in_usd = own.get("charging.currency", charge.currency or "USD") == "USD"
            price = own.get("charging.price_per_unit", charge.price_per_unit) if in_usd else None
            for work, gpus, batch in sorted(shapes):
                rate = rates.find(work, gpu, batch, cells, gpus=gpus)
                if rate is None or (is_slurm and gpus > entry.get("max_per_node", 1)):
                    continue
                peak = memory.predict(work.model, recipes.fields_of(work.recipe), work.resolution_px, batch, gpus)
                fits = peak and peak.needed_mib <= memory.usable_mib(rates.cards()[gpu])
                if not (rate.measured or fits):
                    continue
                images = wish["images"] * wish["epochs"]
                hours, joules = scaled(rate.seconds(images), 1 / 3600), rate.joules(images)
                time_min, starts = _time_limit(hours[2], entry.get("max_minutes"))
                if starts > 1 and not requeues:
                    continue
                charged, per_hour = charge.unit != site_rates.GPU_HOURS.unit, charge.units_per_gpu_hour * gpus
                units = scaled(hours, per_hour) if charged else None
                yield Option(
                    site=site, gpu=gpu, gpus=gpus, batch=batch, recipe=work.recipe, hours=hours,
                    gpu_hours=scaled(hours, gpus), service_units=units,
                    usd=scaled(units, price) if units and price else None, joules=joules,
                    gco2=scaled(joules, grid / 3.6e6) if joules and grid is not None else None,
                    memory_gib=peak.needed_mib / 1024 if peak else None, source=rate.source,
                    command=_command(wish, site, gpu, gpus, batch, work, time_min, starts),
                )  # fmt: skip


def _is_wanted(recipe: str, wished: str | None) -> bool:
    """Return whether a recipe has the levers of the one that was wished for; by default, whether it names a bundle."""
    try:
        levers = recipes.lever_names(recipe)
    except UserError:  # the recipe of another program, or of a version that did not record levers
        return recipe == wished
    return levers == recipes.lever_names(wished) if wished else recipe.partition("+")[0] in recipes.bundles()


def _nothing(wish: dict[str, Any], cells: Sequence[rates.Cell], user: dict[str, Any]) -> str:
    """Return that nothing fits the wishes, and for each of them with which values there would be an option."""
    chosen = [key for key in ("gpu", "gpus", "px", "batch", "recipe", "site") if key in wish]
    wished = " ".join(f"{key}={wish[key]}" for key in ("model", *chosen))
    if any(_options(wish, cells, user, any_length=True)):
        how = "set requeue.request in the site file; a job in a container cannot requeue itself"
        return f"{wished}: takes longer than a job may run, and no job would requeue itself there; {how}"
    values: dict[str, Iterable[Any]] = {}
    for key in chosen:
        others = {name: value for name, value in wish.items() if name != key}
        if key == "px":
            sizes = {cell.work.resolution_px for cell in cells if cell.work.model == wish["model"]}
            values[key] = {px for px in sizes if any(_options({**others, key: px}, cells, user))}
        else:
            values[key] = {getattr(option, key) for option in _options(others, cells, user)}
    if "site" not in wish and any(_options({**wish, "site": "local"}, cells, user)):
        values["site"] = ["local (this machine)"]
    changes = "; ".join(f"{key}={list_some(list(map(str, sorted(each))), 6)}" for key, each in values.items() if each)
    alternatives = f" If one of these changes, there is {changes}." if changes else ""
    return f"{wished}: no option is known.{alternatives} Run it once, merge, and name the dataset with --datasets"


def _time_limit(most_h: float, longest: Any) -> tuple[int, int]:
    """Return `time_min` of a training that takes at most so long, and its starts; `longest`: minutes a job may have."""
    time_min = max(10, math.ceil(most_h * 66))
    if isinstance(longest, int) and time_min > longest:
        return longest, math.ceil(time_min / longest)
    return time_min, 1


def _command(
    wish: dict[str, Any], site: str, gpu: str, gpus: int, batch: int, work: rates.Work, time_min: int, starts: int
) -> str:
    fields = recipes.fields_of(work.recipe)
    prepared = any(name in recipes.PREPARED_ONLY for name in fields)
    needed = [GRAPH_WARMUP] if gpus > 1 and fields.get("cuda_graph") else []
    model = read_config_file(conf_dir() / "model" / f"{work.model}.yaml", "model")
    if model.get("dtype") == "bf16" and "weights" not in fields:  # its weights, and moments, are trained in fp32
        needed.append("model.dtype=fp32")
    if starts > 1 + TimeoutPolicy().requeues:
        needed.append(f"rerun.timeout.requeues={starts - 1}")
    return shell_command(
        "launch", "-m", f"workload={work.workload}", f"model={work.model}", f"recipe={work.recipe}", f"batch={batch}",
        f"gpu={gpu}", f"gpus={gpus}", f"site={site}", f"data.resolution_px={work.resolution_px}",
        f"workload.train_steps={math.ceil(wish['images'] * wish['epochs'] / (batch * gpus))}",
        f"workload.dataset_images={wish['images']}",
        f"time_min={time_min}", f"data={'prepared' if prepared else 'folder'}", "data.root=DATA", *needed,
    )  # fmt: skip


def _otherwise(options: Sequence[Option], limits: dict[str, tuple[float, str]]) -> Iterator[str]:
    """Yield what would make an option feasible: the least of one limit if the other one is kept, or of all."""
    hours, budget = limits
    for kept, least in ((hours, budget), (budget, hours)):
        most, unit = limits[kept]
        if keeping := [o for o in options if o.cost(kept) <= most and o.cost(least) < math.inf]:
            option = min(keeping, key=methodcaller("cost", least))
            name = f"{most:g} {unit}, least {'budget' if kept == hours else 'time'}"
        else:
            option = min(options, key=methodcaller("cost", kept))
            name = f"least {'time' if kept == hours else 'budget'} of all"
        if keeping and math.isinf(most):
            continue
        takes = [amount([cost], unit) for key, (_, unit) in limits.items() if (cost := option.cost(key)) < math.inf]
        yield f"{name}: {' and '.join(takes)} with {option} ({option.source})"
