"""The cost of a run: formulas, the compiled program, the planner."""
