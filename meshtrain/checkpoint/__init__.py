"""Saved states: stored, restored, begun from other weights, exported."""
