"""HOW IT SPREADS: pipeline schedules and what runs them. Given functions; imports no model and no training."""
