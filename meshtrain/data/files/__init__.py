"""Files of tokens: our own, and the binary formats of others."""
