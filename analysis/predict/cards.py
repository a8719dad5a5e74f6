"""Predict the measured cells of a dataset on other cards, as claims. Not measured. core/estimates says how."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from analysis.dataset import Dataset
from inpaint_bench.core import estimates
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.estimates import rates

from .claims import Claim, ClaimedCell, named, now


def predict(
    dataset: Dataset, *, cards: Sequence[str], recipe: str | None = None, batch: int | None = None
) -> Iterator[Claim | str]:
    """Yield a claim for each cell of one GPU and each card, or a sentence where there is none.

    A card that the dataset has measured is predicted from the others. Raises UserError for a card without peaks.
    """
    if unknown := [name for name in cards if name not in rates.cards()]:
        raise UserError(f"{unknown[0]}: no card whose peaks are in conf/gpu; have: {', '.join(sorted(rates.cards()))}")
    cells = [cell for cell in rates.read_cells(dataset.folder) if cell.place == (1, 1)]
    wanted = [c for c in cells if recipe in (None, c.work.recipe) and batch in (None, c.batch) and not c.work.variant]
    if not wanted:
        raise UserError(f"{dataset.folder}: no valid run on one GPU (with this recipe and batch)")
    for work, size in dict.fromkeys((cell.work, cell.batch) for cell in wanted):
        for card in cards:
            rate = rates.find(work, card, size, [cell for cell in cells if cell.gpu != card])
            claimed = ClaimedCell(workload=work.workload, model=work.model, recipe=work.recipe, gpu=card, batch=size)
            if rate is None:
                yield f"{claimed}: another card must have measured it, and FlashAttention-4 needs Hopper"
                continue
            value, low, high = rates.spread(rate.images_per_s, rate.error)
            yield Claim(
                kind="cards",
                cell=claimed,
                value=value,
                low=low,
                high=high,
                made_at=now(),
                inputs=[named(estimates.FOLDER / "shares.csv"), named(dataset.folder)],
                label="" if rates.is_hopper(card) else rates.EXTRAPOLATED,
            )


def known_errors(dataset: Dataset) -> Iterator[str]:
    """Yield how far the cards of the dataset are from predictions by each other, and published ratios from theirs."""
    for kind, what, predicted, measured in rates.left_out_cards(rates.read_cells(dataset.folder)):
        if kind == "card":
            error = f"{100 * (predicted / measured - 1):+.1f} %"
            yield f"{what}: predicted {predicted:.1f} images/s, measured {measured:.1f}: {error}"
    for row in estimates.rows("errors.csv"):
        if row["kind"] == "card, published":
            ratio, stated = float(row["predicted"]), float(row["reference"])
            yield f"{row['what']}: {ratio:.2f} times slower predicted, {stated:.2f} published"
