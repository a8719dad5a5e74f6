"""The fault matrix, on real Slurm: `make faults`. Each row checks `status`, `rerun` and what is lost.

matrix: causes all faults, concurrently. test_causes: application error, GPU out of memory, host out of memory, sidecar
killed, job killed within a Parquet part, a clock that jumps, scancel of one job, cancel of all, node failure, Slurm's
own requeue, a workload that never starts, a full disk.

test_requeues: time limit, pre-emption with grace (three times, and where the site does not requeue), with the losses
of an undisturbed training.

test_submitting: sbatch refuses, an array over MaxArraySize, sacct down, slurmctld down for a minute, a launch killed
while it submits, two launches at once, two reruns at once.

test_still_submitting: cancel beside a launch that still submits, also over ssh; an array that Slurm accepted though
sbatch got no answer.

test_the_final_rerun: one `rerun` per sweep completes it.
"""
