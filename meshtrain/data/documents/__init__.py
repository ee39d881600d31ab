"""Documents as they are read: formats, conversations and their templates, tokenizers; and what a batch is."""
