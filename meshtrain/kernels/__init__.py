"""Attention, linear attention and grouped matmuls on one device. Knows no mesh."""
