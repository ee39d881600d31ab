"""Checkpoints: saving, restoring, initialization from other weights, export."""
