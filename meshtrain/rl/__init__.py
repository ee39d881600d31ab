"""Training on answers that the run samples: its prompts and samplers, and the feed of the training loop."""
