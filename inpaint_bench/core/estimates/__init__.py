"""What a run will need: memory, rate and energy."""
