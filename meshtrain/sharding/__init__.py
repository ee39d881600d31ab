"""Sharding: the mesh (devices -> five axes) and the rules (logical axis -> mesh axes)."""
