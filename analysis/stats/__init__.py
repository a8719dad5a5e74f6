"""Statistics over runs: cells, intervals, best batch, studies, bottlenecks."""
