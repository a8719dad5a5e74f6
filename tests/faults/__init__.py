"""The fault matrix, on real Slurm: `make faults`. For each row: what `status` says, what `rerun` does, what is lost.

test_causes: application error, GPU out of memory, host out of memory, sidecar killed, job killed in mid-part, time
limit, pre-emption with grace (three times, with the losses of a training left alone), node death, scancel of one,
cancel of all, Slurm's own requeue, a full disk, a workload that never starts.

test_submitting: sbatch refuses, slurmctld down for a minute, a launch killed in mid-submit, two launches at once, two
reruns at once.

Quick enough for `make test` are an array over MaxArraySize, and sacct or squeue down (tests/launcher/test_sweeps.py),
and a clock that jumps (tests/analysis/test_lies.py: the clock of this machine is not ours to turn).
"""
