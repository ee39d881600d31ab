"""How the work spreads: split sequences, pipeline schedules and their executors. Given functions; imports no model."""
