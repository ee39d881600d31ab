"""What is computed: parameters and their metadata, layers, attention, transformer, loss. Knows no mesh axis."""
