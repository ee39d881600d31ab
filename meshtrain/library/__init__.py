"""The library for any model: layouts, gradients, training and pipelines of arrays and functions."""
