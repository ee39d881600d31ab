"""Tests whether a run or a layer computes the same on every layout as on one device: `prove`, `prove_layer`, `Proof`.
"""
from meshtrain.parity.layer import prove_layer
from meshtrain.parity.proof import CellResult, Proof, line, prove, summarize

__all__ = ["CellResult", "Proof", "line", "prove", "prove_layer", "summarize"]
