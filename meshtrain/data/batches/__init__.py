"""Batches of documents: order, packing, mixtures, held-out documents, preference pairs."""
