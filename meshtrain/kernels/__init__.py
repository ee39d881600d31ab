"""Attention and grouped matmuls on one device. Knows no mesh."""
