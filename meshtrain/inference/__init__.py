"""The answer: text from trained weights."""
