"""Batches of documents: order, packing, mixtures, held-out documents, pairs of preferences."""
