"""What it costs: formulas, the compiled program, the planner."""
