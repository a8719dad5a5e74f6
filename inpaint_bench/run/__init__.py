"""One attempt inside a job: worker, timed loop, trainer, checkpoints, manifest."""
