"""Input data: formats, sources, tokenizers, token files and batches of packed documents. No jax, no mesh."""
