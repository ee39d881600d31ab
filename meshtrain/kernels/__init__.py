"""Attention on one device: engines of one contract, (o, lse) <- (q, k, v, mask). They know no mesh."""
