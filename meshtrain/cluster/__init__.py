"""Several processes: who they are, how they meet, what they decide together."""
