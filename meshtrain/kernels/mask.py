"""Which keys a query sees, and how a pair is scored: two values that every engine
and every method of context parallelism carries.

A mask speaks of places alone. Which tokens are of one document is data: segments travel beside keys and queries. A
window of w is that of transformers and FlashAttention: a token sees itself and the w - 1 tokens before it. Knows no
mesh.
"""
from __future__ import annotations

from typing import NamedTuple


class Mask(NamedTuple):
    """Query t and key s are t + ahead - s tokens apart; the mask bounds that distance.

    causal: no key after its query. window: tokens that a query sees, itself among them; 0: all. ahead: by how many
    tokens the queries begin after the keys, as those of a later chunk do. documents: whether segments are compared as
    well.
    """
    causal: bool = True
    window: int = 0
    ahead: int = 0
    documents: bool = True

    def within(self, length: int) -> Mask:
        """The same mask of sequences of this length, without a window that reaches over all of them."""
        return self._replace(window=self.window if self.window < length else 0)

    def sees(self, q_at, k_at):
        """bool, of arrays of places that broadcast; None where every pair sees each other."""
        # The places are compared as they are: their difference would stand in a kernel's registers, once for each pair.
        late = q_at >= (k_at - self.ahead if self.ahead else k_at) if self.causal else None
        near = q_at < k_at + (self.window - self.ahead) if self.window else None
        return late & near if self.causal and self.window else late if self.causal else near

    def of_blocks(self, q_first, q_last, k_first, k_last):
        """(whether any pair of the two blocks sees each other, whether all do); the last places are within the
        blocks."""
        least, most = self.ahead + q_first - k_last, self.ahead + q_last - k_first
        some = every = least <= most
        if self.causal:
            some, every = some & (most >= 0), every & (least >= 0)
        if self.window:
            some, every = some & (least < self.window), every & (most < self.window)
        return some, every

    @property
    def label(self) -> str:
        """In the names of kernels: "", "_causal", "_causal_window4096", "_window4096_ahead2048"."""
        return "_causal" * self.causal + (f"_window{self.window}" if self.window else "") + (
            f"_ahead{self.ahead}" if self.ahead else "")


CAUSAL, WHOLE = Mask(), Mask(causal=False)


class Scores(NamedTuple):
    """What becomes of the product of a query and a key. width: scores are divided by its root; 0: head_dim. softcap:
    what tanh keeps them within (Gemma 2, arXiv:2408.00118); 0: nothing."""
    width: int = 0
    softcap: float = 0.0

    def scale(self, head_dim: int) -> float:
        return (self.width or head_dim) ** -0.5
