"""Token files: our own, and the binary formats of other trainers."""
