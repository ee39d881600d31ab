"""Reading documents: formats, conversations, chat templates, tokenizers; and the interfaces of sources and batches."""
