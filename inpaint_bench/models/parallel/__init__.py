"""One training step over several processes: averaged gradients, divided state and weights."""
