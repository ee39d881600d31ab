"""Loads the weights of model folders into runs; exports the weights of runs; finds the stop tokens of both."""
