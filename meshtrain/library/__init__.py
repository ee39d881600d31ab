"""The library under anybody's model: layouts, gradients, training and pipelines of arrays and functions."""
