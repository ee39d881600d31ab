"""Attention, linear attention and grouped matmuls on one device. This package knows no mesh."""
