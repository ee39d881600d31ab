"""What a run file leaves open: each module has `choose`, from what the run and its devices are to a value and why."""
