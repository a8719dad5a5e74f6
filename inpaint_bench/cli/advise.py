"""`advise`: which site, card, batch and recipe, from measured and predicted rates. Loads no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from analysis import site_rates
from inpaint_bench.core.config import recipe as recipes
from inpaint_bench.core.config.user_file import read_user_file, user_file
from inpaint_bench.core.config.validation import did_you_mean
from inpaint_bench.core.config.yaml_file import read_config_file
from inpaint_bench.core.console import echo, shell_command
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.estimates import memory, rates
from inpaint_bench.core.paths import conf_dir

NUMBERS = ("images", "epochs", "deadline_h", "budget_su", "budget_usd", "budget_gpu_h", "batch", "px")
KEYS = ("model", *NUMBERS, "recipe", "gpu", "site")
BUDGETS = {"budget_su": "service_units", "budget_usd": "usd", "budget_gpu_h": "gpu_hours"}
UNITS = {"service_units": "SU", "usd": "USD", "gpu_hours": "GPU-h"}
Interval = tuple[float, float, float]  # expected, least, most
_Place = tuple[str, str, int, dict[str, Any]]  # site, card, number of cards, the card's entry in the site file


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
    memory_gib: float | None
    source: str
    command: str

    def cost(self, name: str) -> float:
        """Return the expected cost, infinite where it is not known."""
        values: Interval | None = getattr(self, name)
        return values[0] if values else math.inf


def run_advise(wishes: Sequence[str], *, datasets: Sequence[Path] | None, as_json: bool) -> int:
    """Print the fastest, the cheapest and the option of least energy; or what would make one feasible, and return 1."""
    wish = _parse(wishes)
    folders = [*(datasets or ()), *(_user_values().get("datasets") or ())]
    options = list(_options(wish, rates.own_cells(folders)))
    if not options:
        raise UserError(
            f"model={wish['model']}: no measured cell and site with these wishes; run it once, merge, and name the "
            "dataset with --datasets, or give site=local for a card of this machine"
        )
    budget = next((BUDGETS[key] for key in BUDGETS if key in wish), "gpu_hours")
    limit, deadline = wish.get(f"budget_{_short(budget)}", math.inf), wish.get("deadline_h", math.inf)
    if all(math.isinf(option.cost(budget)) for option in options):
        how = "; set sites.<site>.charging.price_per_unit in your own file" if budget == "usd" else ""
        raise UserError(f"budget_{_short(budget)}: no site has {UNITS[budget]} for these options{how}")
    feasible = [option for option in options if option.hours[0] <= deadline and option.cost(budget) <= limit]
    orders: dict[str, Callable[[Option], float]] = {
        "fastest": lambda option: option.hours[0],
        "cheapest": lambda option: option.cost(budget),
        "least energy": lambda option: option.cost("joules"),
    }
    chosen = {name: min(feasible, key=order) for name, order in orders.items()} if feasible else {}
    otherwise = [] if feasible else _otherwise(options, budget, deadline, limit)
    if as_json:
        named = {name: asdict(option) for name, option in chosen.items()}
        content = {"wishes": wish, "feasible": bool(feasible), "options": named, "otherwise": otherwise}
        echo(json.dumps(content, indent=1))
    elif feasible:
        for name, option in chosen.items():
            echo("\n".join([f"{name}:", *_lines(option)]))
            if option.hours[2] > deadline or (getattr(option, budget) or (0, 0, 0))[2] > limit:
                echo(f"    the upper end of an interval exceeds {_wanted(deadline, limit, budget)}")
        echo("Expected values, with the interval in parentheses. A service unit of one site is not that of another.")
    else:
        echo(f"No option keeps to {_wanted(deadline, limit, budget)}.")
        echo("\n".join(f"    {sentence}" for sentence in otherwise))
    return 0 if feasible else 1


def _short(budget: str) -> str:
    return next(key for key, name in BUDGETS.items() if name == budget).removeprefix("budget_")


def _parse(wishes: Sequence[str]) -> dict[str, Any]:
    """Return the wishes by key. Raises UserError for what cannot be used."""
    wish: dict[str, Any] = {}
    for text in wishes:
        key, equals, value = text.partition("=")
        if key not in KEYS:
            raise UserError(f"{text}: no such key.{did_you_mean(key, KEYS)} advise takes {', '.join(KEYS)}")
        if key in wish:
            raise UserError(f"{key}: is given twice")
        if key in NUMBERS:
            try:
                number = float(value)
            except ValueError:
                number = math.nan
            whole = key in ("images", "batch", "px")
            if not (0 < number < math.inf) or (whole and number % 1):
                raise UserError(f"{key}{equals}{value}: must be a {'whole ' if whole else ''}number above 0")
            wish[key] = int(number) if whole else number
        elif not value:
            raise UserError(f"{key}=: is empty; name one")
        else:
            wish[key] = value
    if missing := [key for key in ("model", "images", "epochs") if key not in wish]:
        raise UserError(f"{', '.join(missing)}: missing; such as model=sd15_inpaint images=6500 epochs=16 deadline_h=4")
    if len(given := [key for key in BUDGETS if key in wish]) > 1:
        raise UserError(f"{' and '.join(given)}: give one budget")
    for key, folder in (("model", "model"), ("gpu", "gpu"), ("site", "site")):
        names = sorted(path.stem for path in (conf_dir() / folder).glob("*.yaml") if path.stem != "auto")
        if key in wish and wish[key] not in names:
            guess = did_you_mean(wish[key], names)
            raise UserError(f"{key}={wish[key]}: no such {key}.{guess} Known are {', '.join(names)}")
    return wish


def _user_values() -> dict[str, Any]:
    path = user_file()
    return read_user_file(path) if path else {}


def _options(wish: dict[str, Any], cells: Sequence[rates.Cell]) -> Iterator[Option]:
    """Yield every option whose rate is known and whose memory suffices, as far as that is known."""
    px = wish.get("px", 512)
    works = {cell.work for cell in cells if (cell.work.model, cell.work.resolution_px) == (wish["model"], px)}
    works = {work for work in works if work.workload in memory.WORKLOADS and not work.variant}
    wanted = wish.get("recipe")
    # LoRA trains other weights, and single levers are steps of an ablation: only where they are asked for.
    works = {work for work in works if work.recipe == wanted or (not wanted and work.recipe in recipes.bundles())}
    shapes = {work: {(c.gpus, c.batch) for c in cells if (c.work, c.nodes) == (work, 1)} for work in works}
    sites = [path.stem for path in sorted((conf_dir() / "site").glob("*.yaml")) if path.stem not in ("auto", "local")]
    for site in sites if "site" not in wish else [wish["site"]]:
        entries = read_config_file(conf_dir() / "site" / f"{site}.yaml", "site").get("gpus", {})
        for gpu in sorted(entries.keys() & ({wish["gpu"]} if "gpu" in wish else rates.cards().keys())):
            for work in sorted(works):
                if "batch" in wish:
                    shapes[work] = {(gpus, wish["batch"]) for gpus, _ in shapes[work]}
                for gpus, batch in sorted(shapes[work]):
                    place = (site, gpu, gpus, entries[gpu])
                    if option := _option(wish, place, work, batch, cells):
                        yield option


def _option(
    wish: dict[str, Any], place: _Place, work: rates.Work, batch: int, cells: Sequence[rates.Cell]
) -> Option | None:
    """Return what a training takes with these cards and batch; None where that is not known, or does not fit."""
    site, gpu, gpus, entry = place
    if gpus > entry.get("max_per_node", 1):
        return None
    rate = rates.find(work, gpu, batch, cells, gpus=gpus)
    peak = memory.predict(work.model, _fields(work.recipe), work.resolution_px, batch, gpus)
    fits = peak.needed_mib <= memory.usable_mib(rates.cards()[gpu]) if peak else bool(rate and rate.measured)
    if rate is None or not fits:
        return None
    images = wish["images"] * wish["epochs"]
    steps = math.ceil(images / (batch * gpus))
    factors = (1, 1 / (1 + rate.error), 1 + rate.error)
    hours = _interval(lambda factor: (images / rate.images_per_s * factor + rate.other_s) / 3600, factors)
    charge = site_rates.rate(site, gpu)
    charged = charge.unit != site_rates.GPU_HOURS.unit
    per_hour = charge.units_per_gpu_hour * gpus
    # A training that reaches the partition's limit requeues itself.
    time_min, longest = max(10, math.ceil(hours[2] * 66)), entry.get("max_minutes")
    time_min = min(time_min, longest) if isinstance(longest, int) else time_min
    price = _user_values().get(f"sites.{site}.charging.price_per_unit", charge.price_per_unit)
    joules, energy = images * rate.joules_per_image, (1, 1 / (1 + rate.joules_error), 1 + rate.joules_error)
    prepared = any(name in recipes.PREPARED_ONLY for name in _fields(work.recipe))
    command = shell_command(
        "launch", "-m", f"workload={work.workload}", f"model={work.model}", f"recipe={work.recipe}", f"batch={batch}",
        f"gpu={gpu}", f"gpus={gpus}", f"site={site}", f"data.resolution_px={work.resolution_px}",
        f"workload.train_steps={steps}", f"workload.dataset_images={wish['images']}",
        f"time_min={time_min}",
        f"data={'prepared' if prepared else 'folder'}", "data.root=DATA",
    )  # fmt: skip
    return Option(
        site=site, gpu=gpu, gpus=gpus, batch=batch, recipe=work.recipe, hours=hours,
        gpu_hours=_interval(lambda value: value * gpus, hours),
        service_units=_interval(lambda value: value * per_hour, hours) if charged else None,
        usd=_interval(lambda value: value * per_hour * price, hours) if charged and price else None,
        joules=_interval(lambda factor: joules * factor, energy) if joules else None,
        memory_gib=peak.needed_mib / 1024 if peak else None, source=rate.source, command=command,
    )  # fmt: skip


def _interval(function: Callable[[float], float], values: Interval) -> Interval:
    expected, least, most = (function(value) for value in values)
    return expected, least, most


def _fields(recipe: str) -> dict[str, Any]:
    """Return the fields that a recipe of a dataset sets: bundles, levers and numbers, joined by `+`."""
    fields: dict[str, Any] = {}
    for part in recipe.split("+"):
        name, equals, value = part.partition("=")
        if part in recipes.bundles():
            fields |= {key: value for key, value in recipes.read_bundle(part).items() if key in recipes.FIELDS}
        elif lever := recipes.LEVERS.get(part):
            fields[lever.field] = lever.value
        elif equals:
            fields[name] = float(value) if value.replace(".", "").isdecimal() else value
    return fields


def _otherwise(options: Sequence[Option], budget: str, deadline: float, limit: float) -> list[str]:
    """Return what would make an option feasible: the least budget, the least time."""
    in_time = [option for option in options if option.hours[0] <= deadline and option.cost(budget) < math.inf]
    affordable = [option for option in options if option.cost(budget) <= limit]
    found = {}
    if in_time and deadline < math.inf:
        found[f"{deadline:g} h, least budget"] = min(in_time, key=lambda option: option.cost(budget))
    if affordable and limit < math.inf:
        found[f"{limit:g} {UNITS[budget]}, least time"] = min(affordable, key=lambda option: option.hours[0])
    if not in_time:
        found["least time of all"] = min(options, key=lambda option: option.hours[0])
    if not affordable:
        found["least budget of all"] = min(options, key=lambda option: option.cost(budget))
    costs = {name: option.cost(budget) for name, option in found.items()}
    return [
        f"{name}: {option.hours[0]:.3g} h"
        + (f" and {costs[name]:.3g} {UNITS[budget]}" if costs[name] < math.inf else "")
        + f" with {_name(option)} ({option.source})"
        for name, option in found.items()
    ]


def _wanted(deadline: float, limit: float, budget: str) -> str:
    parts = [f"{deadline:g} h"] if deadline < math.inf else []
    return " and ".join([*parts, f"{limit:g} {UNITS[budget]}"] if limit < math.inf else parts)


def _name(option: Option) -> str:
    cards = f"{option.gpus} x {option.gpu}" if option.gpus > 1 else option.gpu
    return f"{cards} at {option.site}, recipe {option.recipe}, batch {option.batch}"


def _lines(option: Option) -> Iterator[str]:
    yield f"    {_name(option)}" + (f", {option.memory_gib:.1f} GiB" if option.memory_gib else "")
    takes = [f"{_text(option.hours)} h", f"{_text(option.gpu_hours)} GPU-h"]
    at_most = " at most" if site_rates.rate(option.site, option.gpu).at_most else ""
    takes += [f"{_text(option.service_units)} SU{at_most}"] if option.service_units else []
    takes += [f"{_text(option.usd)} USD"] if option.usd else []
    takes += [f"{_text(option.joules, 1e6)} MJ"] if option.joules else ["energy not known"]
    yield f"    {', '.join(takes)}"
    yield f"    {option.source}"
    yield f"    {option.command}"


def _text(values: Interval, over: float = 1) -> str:
    expected, least, most = (f"{value / over:.3g}" for value in values)
    return f"{expected} ({least} to {most})"
