"""Attention over sequences that are split: ring, gathered keys and values, Ulysses, in zigzag order."""
