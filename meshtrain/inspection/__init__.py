"""Memory, traffic and time of a compiled run, compared with the formulas; plans and measured runs as JSON and text."""
