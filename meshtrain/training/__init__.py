"""When: step, loop, state, optimizer, data, checkpoint, metrics."""
