"""The search over meshes, rule files, schedules and microbatches, and what separates two answers."""
