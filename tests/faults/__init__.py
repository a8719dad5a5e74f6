"""The fault matrix, on real Slurm: `make faults`. For each row: what `status` says, what `rerun` does, what is lost.

matrix: what happens, all at once. test_causes: application error, GPU out of memory, host out of memory, sidecar
killed, job killed in mid-part, a clock that jumps, scancel of one, cancel of all, node death, Slurm's own requeue, a
workload that never starts, a full disk.

test_requeues: time limit, pre-emption with grace (three times, and where the site does not requeue), with the losses
of a training left alone.

test_submitting: sbatch refuses, an array over MaxArraySize, sacct down, slurmctld down for a minute, a launch killed
in mid-submit, two launches at once, two reruns at once.

test_still_submitting: cancel beside a launch that still submits, also over ssh; an array that Slurm took though sbatch
got no answer.

test_the_next_command: one `rerun` per sweep heals it.
"""
