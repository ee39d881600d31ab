"""Runtime of a training process: loop, validation, signals, run directory."""
