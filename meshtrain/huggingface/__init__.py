"""Model folders of Hugging Face: their names, shapes, settings and files, both ways. Knows no jax and no model of
ours."""
