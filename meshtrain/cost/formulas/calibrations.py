"""The table of constants that describe compiled programs: bytes that XLA moves, and what it keeps meanwhile.

A new version of XLA may change each of them. To read a constant again, compile the programs that its comment names and
compare their bytes with the formulas (`inspect --topology`); tests/gpu/test_gpu_programs.py does so for some layouts
with the installed jax. Constants of recurrences stand by engine and mixer in `recurrences`; widths of temporaries stand
beside their formulas in `footprint`; assumed speeds of GPUs are in `assumptions`.
"""
from __future__ import annotations

from typing import NamedTuple


class Passes(NamedTuple):
    """A constant of the forward and of the backward."""
    forward: float
    backward: float


LOGIT = 14                  # HBM bytes of a logit, forward and backward
CHOSEN_LOGIT = 12           # HBM bytes of a logit of a teacher: written, read for its sum and for its group
UPDATE = 14                 # HBM bytes of a parameter in the optimizer's update, besides the optimizer's state
QK_NORM = Passes(6, 17)     # HBM bytes of a normed element of queries and keys
FLOAT8_CAST = 5             # HBM bytes of an element cast to float8: read for the maximum, read again, written
# HBM bytes of an accumulator's element per step: zeroed, transposed for the reduction. From 1B on 8 H100
# (configs/llama3.2-1b.toml) and 8B on 64 (configs/llama3-8b-64.toml).
ACCUMULATOR = 12
# HBM bytes of a gradient's element that a loop adds to the stack of its layers. From the same programs, 8B with stage
# 2, and 70B with tensor 8 × stage 4.
STACKED_GRADIENT = 12
# Passes of the residuals of a separate W through HBM, in B and again in W: slots and a mask. From 8B with stage 2, and
# 70B with tensor 8 × stage 4.
MASKED_RESIDUAL = 4
# HBM bytes of an element of expanded keys and values: copies of operands, sums of gradients. GATHERED: the same where
# sequences are split: of all tokens, and of single chunks.
EXPANDED_LATENT, GATHERED_LATENT = Passes(7, 15), Passes(26, 54)
# Fraction of a recurrence's live arrays that other recurrences of its period hold meanwhile.
WAITING_RECURRENCE = .35
# The rest is from samplers of 8B on 8 H100 and of 70B on 64, 64 slots of 2,048 and 4,096 tokens a GPU.
DRAW_COLLECTIVES = 4        # collectives of a decoding step over the vocabulary: maxima and sums of logits
END_COLLECTIVES = 4         # collectives of a decoding step over the batch: end flags and sampled tokens
SAMPLER_SPARE = 0.1         # fraction of memory left free for prefill and logits; 1.0 and 1.3 of 72.8 GiB were used
