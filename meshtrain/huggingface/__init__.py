"""Hugging Face model folders, read and written: names, shapes, settings, files. Knows no jax and no model of ours."""
