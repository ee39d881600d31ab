"""The training step: gradients, optimizer update, state."""
