"""Pipelines over the stage axis: schedules as tables, and the one program that runs them."""
