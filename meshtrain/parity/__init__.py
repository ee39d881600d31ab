"""Whether a run computes on every layout what one device computes: `prove` and its `Proof`."""
from meshtrain.parity.proof import CellResult, Proof, prove

__all__ = ["CellResult", "Proof", "prove"]
