"""The dense MLP of a layer: XLA's matmuls, or the fused kernels that `choices.mlp` chose (`fused_mlp.FusedMLP`)."""
from __future__ import annotations

from functools import partial

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from meshtrain.config.sections import Model
from meshtrain.kernels import activations, products
from meshtrain.model.execution import Execution, recompute
from meshtrain.model.layers import Linear, gather_weight, place_gradient, together
from meshtrain.sharding import reduced


GATE_UP = "mlp_gate_up"         # name of the gate and up projections' outputs in remat policies


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def apply_kernels(ex: Execution, axes, x_BTD, ws):
    """Return the MLP's output [B, T, D], computed by the fused kernels of `ex.engines.mlp`.

    ws: the gate, up and down weights. axes: their logical axes. Gathers and gradients are placed as in `project`."""
    return _apply_kernels_forward(ex, axes, x_BTD, ws)[0]


def _apply_kernels_forward(ex: Execution, axes, x_BTD, ws):
    assert ex.engines.mlp is not None
    full = tuple(map(partial(gather_weight, ex), ws, axes))
    *gate_up, h_BTF = ex.engines.mlp.forward(ex.layout, x_BTD, *full[:2])
    gate_up = [checkpoint_name(y_BTF, GATE_UP) for y_BTF in gate_up]
    y_BTD = products.einsum("BTF,FD->BTD", h_BTF, full[2])
    return y_BTD, (x_BTD, ws if ex.numerics.remat == "none" else full, gate_up)


def _apply_kernels_backward(ex: Execution, axes, saved, dy_BTD):
    assert ex.engines.mlp is not None
    x_BTD, ws, gate_up = saved
    gate, up, down = map(partial(gather_weight, ex), ws, axes) if ex.numerics.remat == "none" else ws
    *grads, h_BTF = ex.engines.mlp.backward(ex.layout, dy_BTD, down, *gate_up)
    of_gate, of_up = (products.einsum("BTF,DF->BTD", d_BTF, w_DF) for d_BTF, w_DF in zip(grads, (gate, up)))
    dtype = reduced.dtype_of(ex.layout)
    dws = [products.einsum("BTD,BTF->DF", x_BTD, d_BTF, dtype) for d_BTF in grads]
    dws.append(products.einsum("BTF,BTD->FD", h_BTF, dy_BTD, dtype))
    # as in `project`: cuBLAS accumulates the second matmul into the first
    return of_up + of_gate, tuple(map(partial(place_gradient, ex), dws, axes))


apply_kernels.defvjp(_apply_kernels_forward, _apply_kernels_backward)


class MLP(nnx.Module):
    """The inward projections, the activation and the outward projection. width: the hidden width; 0: mlp_dim."""

    def __init__(self, cfg: Model, rngs: nnx.Rngs, width: int = 0):
        D, F, bias = cfg.embed_dim, width or cfg.mlp_dim, cfg.mlp_bias
        self.activation = activations.find(cfg.activation)
        self.gate = Linear(cfg, rngs, "BTD,DF->BTF", (D, F), ("embed", "mlp"), bias=bias) if cfg.gated else None
        self.up = Linear(cfg, rngs, "BTD,DF->BTF", (D, F), ("embed", "mlp"), bias=bias)
        self.down = Linear(cfg, rngs, "BTF,FD->BTD", (F, D), ("mlp", "embed"), bias=bias,
                           std=(F * 2 * cfg.num_layers) ** -0.5)

    def __call__(self, ex: Execution, x_BTD):
        act = ex.layout.act
        if ex.engines.mlp is not None and ex.engines.mlp.fits(self.up.kernel[...].shape[1]):
            linears = [linear for linear in (self.gate, self.up, self.down) if linear is not None]
            return apply_kernels(ex, tuple(linear.axes for linear in linears), x_BTD,
                             tuple(linear.kernel[...] for linear in linears))
        inward = [linear for linear in (self.up, self.gate) if linear is not None]
        up_BTF, *gate = (act(y, "batch", "seq", "mlp")
                         for y in together(ex, x_BTD, *((linear, 1) for linear in inward)))
        gate_BTF = gate[0] if gate else None

        def down(gate_BTF, up_BTF):
            h_BTF = self.activation(up_BTF) if gate_BTF is None else self.activation(gate_BTF, up_BTF)
            return self.down(ex, act(h_BTF, "batch", "seq", "mlp"), out_axes=("batch", "seq", None))
        return recompute(ex, down)(gate_BTF, up_BTF)
