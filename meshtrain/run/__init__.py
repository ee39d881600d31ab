"""Runtime of a training process: loop, metrics, validation, history, run directory."""
