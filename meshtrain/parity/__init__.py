"""Whether a run, or a layer, computes on every layout what one device computes: `prove`, `prove_layer`, `Proof`."""
from meshtrain.parity.layer import prove_layer
from meshtrain.parity.proof import CellResult, Proof, line, prove

__all__ = ["CellResult", "Proof", "line", "prove", "prove_layer"]
