"""How the work spreads: split sequences, pipeline schedules and what runs them. Given functions; imports no model."""
