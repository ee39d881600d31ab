"""The model: parameters and their metadata, layers, transformer, loss. Knows no mesh axis."""
