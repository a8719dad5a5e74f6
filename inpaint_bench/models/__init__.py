"""Networks of the fine-tune, its training step, optimizers and caches."""
