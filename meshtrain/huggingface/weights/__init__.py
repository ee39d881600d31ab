"""Loads the weights of model folders into runs, and exports those of runs; finds the stop tokens of both."""
