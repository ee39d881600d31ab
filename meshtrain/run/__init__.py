"""Between two steps: loop, metrics, validation, history, run directory."""
