"""Names for people, as titles and answers have them: of workloads, models, GPUs and times."""

import datetime as dt
from collections.abc import Iterable, Sequence

from analysis.units import gpu_label
from inpaint_bench.core.schema import COMMAND, UNKNOWN

WORKLOADS = {
    "finetune_inpaint": "inpainting fine-tune",
    "finetune_text2image": "text-to-image fine-tune",
    "sd_inference": "image generation",
    "volume3d_train": "training of 3-D volume diffusion",
    "volume3d_sample": "sampling of 3-D volumes",
    "denoise_patch": "denoisers",
    "denoise_shape": "denoisers",
    "fid_clip": "FID and CLIP score",
    COMMAND: "external program",
}
_MODELS = {"tiny": "tiny model", "sdxl": "SDXL", "sd15": "SD 1.5", "sd2": "SD 2"}  # by the first word of the name
_MODELS |= {"sd35": "SD 3.5", "flux": "FLUX.1", "flux2": "FLUX.2"}
_AN = tuple("AEFHILMNORSX")  # letters whose names begin with a vowel


def model(name: str | None) -> str:
    """Return the family of a known model, else its own name, without sampler and guidance behind it."""
    own = (name or "").partition(",")[0]
    return _MODELS.get(own.partition("_")[0], own)


def work(workload: str, models: Iterable[str | None]) -> str:
    """Return `SD 1.5 and SDXL inpainting fine-tune`. Networks that no model of ours are named by are left out, and the
    models of a workload of the user's own, which need not read `model`.
    """
    known = models if workload in WORKLOADS else ()
    families = [family for family in dict.fromkeys(map(model, known)) if family in _MODELS.values()]
    return " ".join(filter(None, [join(families), WORKLOADS.get(workload, workload)]))


def gpu(name: str, count: int | None = 1) -> str:
    """Return `an H200`, `2 H200` or `the CPU`."""
    if name == "cpu":
        return "the CPU"
    if name == UNKNOWN:
        return "an unknown GPU"
    label = gpu_label(name)
    return f"{count} {label}" if (count or 1) > 1 else f"{'an' if label.startswith(_AN) else 'a'} {label}"


def capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def join(names: Sequence[str], most: int = 3) -> str:
    """Return `a, b and c`, of more than `most` the first ones and the number of the others."""
    shown = [*names[:most], *([f"{len(names) - most} more"] if len(names) > most else [])]
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))


def days(times: Iterable[dt.datetime | None]) -> str:
    """Return `21 Nov 2026`, `22 to 23 Nov 2026`; empty if no time is known."""
    known = sorted(time for time in times if time)
    ends = [(f"{time.day}", f"{time:%b}", f"{time:%Y}") for time in (known[0], known[-1])] if known else []
    if not ends:
        return ""
    first, last = ends
    # Parts that both ends share are said once, behind the last.
    same = next((i for i in range(3) if first[i:] == last[i:]), 3)
    return " ".join(last) if same == 0 else f"{' '.join(first[:same])} to {' '.join(last)}"


def count_runs(n: int) -> str:
    """Return what to say beside a figure without an interval."""
    return "1 run" if n == 1 else f"{n} runs, no interval"


def of_many(count: int) -> list[str]:
    """Return what to say beside a list of more than four compared cells; empty for a shorter one."""
    return [f"Not corrected for many comparisons: of {count} some may differ by chance."] if count > 4 else []


def versus(ratio: float, name: str, *, tie: bool = False, of_times: bool = False) -> str:
    """Return `5 % faster than the H100`, `4.3 times the plain loop` or `as fast as the H100 (a tie)`.

    With `of_times` the ratio is of latencies and not of rates: `5.7 times faster than the plain pipeline`.
    """
    if tie:
        return f"as fast as {name} (a tie)"
    if ratio >= 2:
        return f"{ratio:.1f} times {'faster than ' if of_times else ''}{name}"
    percent = abs(100 * (ratio - 1))
    return f"{percent:.{0 if percent >= 1 else 1}f} % {'faster' if ratio > 1 else 'slower'} than {name}"
