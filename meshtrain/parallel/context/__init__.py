"""Context parallelism: ring, all-gather and Ulysses attention, and the zigzag order."""
