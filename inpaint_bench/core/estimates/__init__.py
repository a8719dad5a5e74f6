"""What a run will need, before it is submitted: memory, rate, energy. Tables of this folder are written by benchmarks/."""
