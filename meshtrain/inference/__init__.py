"""Inference: generation and scoring with trained weights."""
