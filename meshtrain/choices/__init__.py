"""Makes the choices that a run file leaves open. `choose` returns a value and the reason, `problems` a layout's
faults."""
