"""The step: gradients, update, optimizers, state."""
