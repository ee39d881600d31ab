"""Searches over meshes, rule files, schedules and microbatches, and explains why one plan is slower than another."""
