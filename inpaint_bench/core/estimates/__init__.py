"""What a run will need: memory, rate and energy, from the tables here that scripts of benchmarks/ write."""
