"""What a run file leaves open. `choose` of a module returns a value and why; `problems` are faults of a layout."""
