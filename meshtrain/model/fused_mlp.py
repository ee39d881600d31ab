"""Dense MLPs by the fused kernels of `kernels.mosaic_mlp`. `choices.mlp` chooses between them and XLA's matmuls.

XLA has no partitioning rule for the kernels, so they run in a `shard_map` over all mesh axes.
"""
from __future__ import annotations

from typing import NamedTuple

from meshtrain.kernels import mosaic_mlp
from meshtrain.sharding.mesh import on_shards
from meshtrain.sharding.rules import GATHERED, Layout


class FusedMLP(NamedTuple):
    """The fused kernels with one activation.

    programs: the GPU's number of multiprocessors. interpret: see `warpgroups.Call`.
    """
    activation: str
    programs: int
    interpret: object = False

    def fits(self, num_hidden: int) -> bool:
        """Return whether the kernels support this mlp_dim. `choices.mlp` has already checked the other sizes."""
        return num_hidden % mosaic_mlp.COLUMNS == 0

    def forward(self, layout: Layout, x_BTD, gate_DF, up_DF):
        """Return gate, up and h = act(gate) · up, each [B, T, F]. gate_DF, up_DF: the gathered weights."""
        def local(x_BTD, gate_DF, up_DF):
            outputs = mosaic_mlp.forward(_rows(x_BTD), gate_DF, up_DF, self.activation, self.programs, self.interpret)
            return tuple(y.reshape(*x_BTD.shape[:2], -1) for y in outputs)
        of_x, of_y, of_w = _specs(layout)
        return on_shards(local, (of_x, of_w, of_w), (of_y,) * 3)(x_BTD, gate_DF, up_DF)

    def backward(self, layout: Layout, dy_BTD, down_FD, gate_BTF, up_BTF):
        """Return the gradients of gate and up, and h again, each [B, T, F]. down_FD: the gathered weight."""
        def local(dy_BTD, down_FD, gate_BTF, up_BTF):
            grads = mosaic_mlp.backward(_rows(dy_BTD), down_FD.T, _rows(gate_BTF), _rows(up_BTF), self.activation,
                                        self.programs, self.interpret)
            return tuple(y.reshape(gate_BTF.shape) for y in grads)
        of_x, of_y, _ = _specs(layout)
        of_down = layout.spec(GATHERED, ("mlp", "embed"))
        return on_shards(local, (of_x, of_down, of_y, of_y), (of_y,) * 3)(dy_BTD, down_FD, gate_BTF, up_BTF)


def _rows(a):
    return a.reshape(-1, a.shape[-1])


def _specs(layout: Layout):
    """PartitionSpecs of x, of the hidden activations, and of the gate and up weights."""
    x, hidden = (layout.spec("activations", layout.in_order("batch", "seq", last)) for last in (None, "mlp"))
    return x, hidden, layout.spec(GATHERED, ("embed", "mlp"))
