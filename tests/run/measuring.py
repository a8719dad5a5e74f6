"""A workload with a protocol of its own, for tests: calls that sleep, on one image each."""

import time

import torch

from inpaint_bench.core.config.bench import BenchConfig
from inpaint_bench.core.schema import WindowKind
from inpaint_bench.core.workloads import Facts
from inpaint_bench.workloads import MeasuringWorkload, Recorder

CALL_S, CALLS = 0.02, 8


class Sleeping(MeasuringWorkload):
    uniform_steps = True

    def __init__(self, config: BenchConfig, *, fail: bool = False) -> None:
        self.images_per_step, self.fail = config.batch_size, fail
        self.facts = Facts(precision="fp32")

    def measure(self, recorder: Recorder) -> None:
        self.calls_total = 2 + CALLS
        for kind, calls in ((WindowKind.WARMUP, 2), (WindowKind.MEASURE, CALLS)):
            with recorder.window(kind):
                for _ in range(calls):
                    assert recorder.call(lambda: time.sleep(CALL_S)).host_ms >= 1000 * CALL_S
                if self.fail and kind is WindowKind.MEASURE:
                    raise ValueError("after its calls")


def build(config: BenchConfig, device: torch.device) -> Sleeping:
    return Sleeping(config, fail=config.seed == 13)
