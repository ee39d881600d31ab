"""Tests whether a run or a layer computes the same on every layout as on one device: `prove`, `prove_layer`, `Proof`.
"""
from meshtrain.parity.compare import check_finite
from meshtrain.parity.layer import choose_layouts, compare_layout, prove_layer
from meshtrain.parity.proof import CellResult, Proof, line, prove, summarize

__all__ = ["CellResult", "Proof", "check_finite", "choose_layouts", "compare_layout", "line", "prove", "prove_layer",
           "summarize"]
