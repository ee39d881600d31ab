"""Computes the cost of a step in closed formulas: bytes, FLOPs and seconds of a model under a layout. Compiles
nothing."""
