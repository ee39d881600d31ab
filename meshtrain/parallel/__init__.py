"""Distribution of the work: split sequences, experts, pipeline schedules. Works on given functions; imports no model.
"""
