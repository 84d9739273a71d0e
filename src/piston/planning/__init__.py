"""Time, memory, data, cost and bottleneck of a run, predicted before it starts. No torch, except to trace."""
