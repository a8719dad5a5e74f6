"""Write docs/results.md from the committed datasets: `python -m benchmarks.results_page`."""

import sys

from inpaint_bench.commands.exit_codes import guarded
from inpaint_bench.core.errors import UserError
from inpaint_bench.core.paths import ROOT

from .results_list import PAGE
from .results_tables import Measured

TARGET = ROOT / "docs" / "results.md"
HEAD = """# What was measured

`python -m benchmarks.results_page` writes this page from the datasets in `benchmarks/results`. A range goes from the
lowest to the highest of n runs. Each run is a process of its own, and only valid runs count
([what makes a run invalid](dataset.md#what-makes-a-run-invalid)). Where no run is valid, the table gives the reason,
such as `oom_gpu`. Recipes are spelled as `recipe=` takes them ([levers](levers.md)), a key as `lora_rank=16` in them as
`recipe.lora_rank=16`. In the dataset of 2026-11-21, `workers_8` and `prefetch_4` are `earlier_baseline` with
`recipe.num_workers=8` and `recipe.prefetch_factor=4`. `baseline` is the plain loop; older datasets have
`earlier_baseline` in its place, which is slower ([both](#beside-the-plain-loop)). Cards are the
different GPUs of n runs. Energy is board power, host not included; its error is a bound for a run, by counter and
sensor. VRAM peaks are those of the measured windows and of the whole run, with parity and cuDNN's search. A run is not
steady where its mean step is more than 2 % off its median step, or the last third of its measured time 2 % off the
first.

Two cards and three batches of one day are in [which GPU, which batch](#which-gpu-which-batch), with slower kernels than
today's. [Planned and done runs](campaign.md) join all datasets: each cell with its n and cards. `inpaint-bench advise`
computes hours, service units and energy of a training from them ([advice](advise.md)). The report of a dataset adds
intervals, telemetry and checks:

```console
$ inpaint-bench report benchmarks/results/2026-11-23-h100-h200 -o report
```

The log of all experiments, failures included, is [benchmarks/README.md](../benchmarks/README.md).
"""


def page() -> str:
    """Return the page as Markdown."""
    sections = ((entry.lines if isinstance(entry, Measured) else entry)() for entry in PAGE)
    return "\n".join([HEAD, *(line for lines in sections for line in lines)]).rstrip() + "\n"


def main() -> int:
    if sys.argv[1:]:
        raise UserError(f"{' '.join(sys.argv[1:])}: results_page takes no arguments")
    TARGET.write_text(page(), encoding="utf-8")
    print(f"Wrote {TARGET.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
