"""How the work spreads: methods that place their collectives themselves. Given functions; imports no model."""
