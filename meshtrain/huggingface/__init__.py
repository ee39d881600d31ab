"""Reads and writes Hugging Face model folders: names, shapes, settings, files. Imports no jax and none of our model
code."""
