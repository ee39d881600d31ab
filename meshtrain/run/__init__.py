"""The run: loop, checkpoints, run directory, metrics, profiling."""
