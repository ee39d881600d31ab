"""The layers, and the weight einsum of all projections.

Dims (for the whole project): B batch, T query position, S key position, D model, N heads, K kv-heads, G=N/K, H head
size, F mlp, E experts, V vocabulary, L layers, P stages, M microbatches. A tensor's suffix is its shape. Layers ask
`ex.layout` for shardings by logical axes; they know no mesh axis. These constraints and the explicit backward of
`project` decide which collectives a GPU runs, and in which dtype. The reasons are given at each place.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from meshtrain import pattern
from meshtrain.config.sections import Model
from meshtrain.kernels import products
from meshtrain.kernels.activations import ACTIVATIONS
from meshtrain.kernels import rotation
from meshtrain.kernels.engine import Mask, Scores
from meshtrain.model import float8
from meshtrain.model.mlp import FusedMLP
from meshtrain.model.params import declare
from meshtrain.model.rope import Rope, grown, normed_and_rotated, rotate
from meshtrain.model.stats import SCORE_BOUND, LayerStats
from meshtrain.sharding import mesh
from meshtrain.sharding.mesh import psum
from meshtrain.sharding.rules import GATHERED, Layout


@dataclasses.dataclass(frozen=True, eq=False)
class Numerics:
    """In which dtypes layers compute, and what they save for the backward.

    float8: the precision of float8 projections; None: projections use `dtype`.
    """
    dtype: jnp.dtype
    remat: str = "none"     # none, selective, full, offload
    float8: jax.lax.DotAlgorithmPreset | None = None


class ExpertEngine(Protocol):
    """Computes the experts of tokens, wherever they are. `parallel.experts.dispatch` has them.

    aux_loss, z_loss: weights of the router's losses.
    """
    @property
    def aux_loss(self) -> float: ...

    @property
    def z_loss(self) -> float: ...

    def __call__(self, layout, x_BTD, chosen_BTK, weight_BTK, weights) -> jax.Array:
        """Return y_BTD."""


class RecurrenceEngine(Protocol):
    """What recurrent mixers call. `parallel.context.recurrence.LinearAttention` is one."""
    @property
    def convolve(self) -> Callable: ...

    @property
    def recur(self) -> Callable: ...

    def _replace(self, *, convolve: Callable = ..., recur: Callable = ...) -> RecurrenceEngine: ...


@dataclasses.dataclass(frozen=True, eq=False)
class Engines:
    """The functions that depend on devices and on how sequences and experts are split.

    attention: (layout, q_BTNH, k_BSKH, v_BSKV, segments_BT, mask=, scores=, sinks_N=, bounded=) -> (o_BTNV, an upper
    bound of each head's scores [N] if bounded, else None). by_kernels: queries and keys are normed and rotated by
    `kernels.rotation`, and attend to their cache by `kernels.decode`.
    """
    attention: Callable
    experts: ExpertEngine | None = None          # None: no experts
    mlp: FusedMLP | None = None             # None: XLA's matmuls
    recurrence: RecurrenceEngine | None = None    # None: no recurrent mixers
    by_kernels: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Execution:
    """How the model is computed: where arrays lie, in which numerics, by which engines."""
    layout: Layout
    numerics: Numerics
    engines: Engines
    in_order: bool = False  # whether collectives outside a loop must not overlap with those in it (`mesh.after`)
    in_parts: bool = False  # the layer sees one part of a microbatch, and its weights are `parts.shared`
    # (number of layers, most heads of a layer): the stats of a layer have SCORE_BOUND; None: they do not
    bounds: tuple[int, int] | None = None

    @property
    def early(self) -> bool:
        """Return whether the MLP's down projection gets its gradient before the mixer's backward (`released`).

        Pipelines may run all W later.
        """
        return self.layout.sizes["stage"] == 1

    def after(self, values, done):
        """Return `values`; if the order matters, they are made to depend on `done`. Both are pytrees."""
        return mesh.after(values, done) if self.in_order else values


def with_numerics(ex: Execution, **changed) -> Execution:
    """Return `ex` with other fields of its numerics."""
    return dataclasses.replace(ex, numerics=dataclasses.replace(ex.numerics, **changed))


def recomputed(ex: Execution, f: Callable) -> Callable:
    """Return f with only its inputs saved for the backward, which recomputes casts and elementwise ops, but no matmul.

    Under remat f is unchanged: the policy decides what is saved.
    """
    keep = jax.checkpoint_policies.save_only_these_names(float8.SCALE)
    # CSE cannot merge across a scan
    return jax.checkpoint(f, policy=keep, prevent_cse=False) if ex.numerics.remat == "none" else f


# --- the weight einsum ---------------------------------------------------------------------------------------------

def gathered(ex: Execution, w: jax.Array, axes) -> jax.Array:
    """Return the weight in the compute dtype, gathered over the axes that split tokens (ZeRO-3). Tensor sharding stays.

    The gather moves (N-1)/N of the weight's bytes in the compute dtype. The weight is first constrained to its shards.
    Otherwise XLA sometimes gathers the float32 master weight and casts afterwards.
    """
    if ex.in_parts:
        return w.astype(ex.numerics.dtype)       # `parts.shared` gathers once for all parts
    w = ex.layout.constrain("params", w.astype(ex.numerics.dtype), axes)
    return ex.layout.constrain(GATHERED, w, axes)


def _placed(ex: Execution, dw, axes):
    """Return a weight's gradient sharded as in [grads].

    With parts it is returned unchanged, because `parts.shared` shards the sum.
    """
    return dw if ex.in_parts else ex.layout.constrain("grads", dw, axes)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def project(ex: Execution, forms, out_axes, frozen: bool, x, ws):
    """Return einsum(eq, x, w) in ex.numerics.dtype for each w of ws, with float32 weight gradients.

    forms: ((eq, logical axes of w), …), e.g. "BTD,DNH->BTNH". out_axes: for a single projection back onto the residual
    stream, the output's logical axes before it is split over the sequence; None for other projections. GPUs reduce a
    weight gradient in the dtype of its dot, so here the dot has a float32 result, sharded as in [grads]. Frozen weights
    get no gradient, and x is not saved for them.
    """
    return tuple(products.einsum(eq, x, gathered(ex, w, axes)) for (eq, axes), w in zip(forms, ws, strict=True))


def _project_forward(ex, forms, out_axes, frozen, x, ws):
    full = [gathered(ex, w, axes) for (_, axes), w in zip(forms, ws, strict=True)]
    # With remat the gathered weight lives only inside the recomputed layer. Without remat, saving it would hold all
    # layers' gathered weights until the backward, so the shard is saved and gathered again.
    ys = tuple(products.einsum(eq, x, w) for (eq, _), w in zip(forms, full))
    return ys, (None if frozen else x, ws if ex.numerics.remat == "none" else tuple(full))


def _project_backward(ex, forms, out_axes, frozen, saved, dys):
    x, ws = saved
    dx, dws = None, []
    for (eq, axes), w, dy in reversed([*zip(forms, ws, dys, strict=True)]):
        if out_axes:
            if ex.layout.sequence_parallel:
                # Sequence parallel: gather the cotangent once, for dx and dw. The barrier is REQUIRED. Without it XLA
                # rewrites later uses of the shard to gather + slice, and a GPU pass turns that into a
                # collective-permute without pairs, which outputs zeros (openxla/xla 45218, 47083). CPU programs are
                # correct without it.
                dy = jax.lax.optimization_barrier(dy)
            dy = ex.layout.act(dy, *out_axes)
        full = gathered(ex, w, axes) if ex.numerics.remat == "none" else w
        operands, out = eq.split("->")
        left, right = operands.split(",")
        product = products.einsum(f"{out},{right}->{left}", dy, full, dy.dtype if x is None else x.dtype)
        dx = product if dx is None else product + dx        # new matmul first, so that cuBLAS accumulates into it
        if not frozen:
            dw = products.einsum(f"{left},{out}->{right}", x, dy, jnp.float32)
            dws.append(_placed(ex, dw, axes))
    return dx, tuple(dws[::-1]) or (None,) * len(forms)


project.defvjp(_project_forward, _project_backward)


class Linear(nnx.Module):
    """A weight of any shape, with an optional bias over its output dims. `model.lora` may freeze and adapt it."""

    def __init__(self, cfg: Model, rngs, eq: str, shape, axes, *, bias=False, std=None, role="matrix"):
        dtype = jnp.dtype(cfg.param_dtype)
        self.eq, self.axes = eq, tuple(axes)
        x_dims, w_dims = eq.split("->")[0].split(",")
        fan_in_dims = sum(dim in x_dims for dim in w_dims)
        self.bias_axes = self.axes[fan_in_dims:]
        self.kernel = declare(rngs, dtype, shape, axes, role, std=std, fan_in_dims=fan_in_dims)
        self.bias = declare(rngs, dtype, shape[fan_in_dims:], self.bias_axes, "bias", value=0.0) if bias else None
        self.frozen, self.lora = False, None

    def __call__(self, ex: Execution, x, out_axes=None, repeats: int = 1):
        """Return the projection of x. repeats: copies of each kv head, see `kv_heads`."""
        return together(ex, x, (self, repeats), out_axes=out_axes)[0]

    def biased(self, ex: Execution, y, repeats: int):
        if self.bias is None:
            return y
        bias, axes = repeated(ex, self.bias[...], self.bias_axes, repeats)
        return add_bias(ex, axes, y, bias)


def together(ex: Execution, x, *linears: tuple[Linear, int], out_axes=None) -> list:
    """Return the outputs of all (Linear, its repeats) for one x. In float8, x is quantized and gathered once for all.
    """
    weights = [repeated(ex, linear.kernel[...], linear.axes, repeats) for linear, repeats in linears]
    forms = tuple((linear.eq, axes) for (linear, _), (_, axes) in zip(linears, weights))
    frozen = linears[0][0].frozen
    multiply = float8.project if ex.numerics.float8 else project
    ys = multiply(ex, forms, out_axes, frozen, x, tuple(w for w, _ in weights))
    ys = [y if linear.lora is None else linear.lora(ex, x, y, repeats, out_axes)
          for (linear, repeats), y in zip(linears, ys)]
    return [linear.biased(ex, y, repeats) for (linear, repeats), y in zip(linears, ys)]


def repeated(ex: Execution, w, axes, repeats: int):
    """Return (w with each kv head `repeats` times, its logical axes).

    Copies are adjacent, so that query groups stay together.

    The copies are sharded like heads before the gather. Each tensor rank takes its head of the unsharded w, and nothing
    moves. In the backward, the gradients of each head are summed over ranks, and all ranks get all heads, in float32.
    """
    if repeats == 1:
        return w, axes
    w = jnp.repeat(w, repeats, axes.index("kv_heads"))
    axes = tuple("heads" if axis == "kv_heads" else axis for axis in axes)
    return ex.layout.constrain(GATHERED, w, axes) if ex.in_parts else ex.layout.constrain("params", w, axes), axes


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def add_bias(ex: Execution, axes, y, bias):
    """Return y + bias, added in float32 and returned in y's dtype, with a float32 bias gradient.

    Autodiff would sum the cotangent over tokens and devices in y's dtype, with an error of 2 to 4% in bfloat16.
    """
    return (y.astype(jnp.float32) + small(ex, bias, axes)).astype(y.dtype)


def _add_bias_forward(ex, axes, y, bias):
    return add_bias(ex, axes, y, bias), None


def _add_bias_backward(ex, axes, _, dy):
    # Only the sum is float32. The cotangent stays in the compute dtype for later matmuls.
    db = jnp.sum(dy, range(dy.ndim - len(axes)), dtype=jnp.float32)
    return dy, _placed(ex, db, axes)


add_bias.defvjp(_add_bias_forward, _add_bias_backward)


def small(ex: Execution, vector, axes):
    """Return a norm scale or bias in float32, gathered over the axes that split tokens (few bytes)."""
    return ex.layout.constrain(GATHERED, vector, axes)


class Norm(nnx.Module):
    """RMSNorm or LayerNorm over the dims of its weights (the last ones), in float32. It returns the compute dtype.

    Tried and rejected: one kernel for the backward of the norm and the residual stream. By the roofline this kernel
    takes 53 ms of a step of llama3-8b on 8 H100, and XLA's two kernels take 93 ms. But XLA then copies x out of its
    stack and repeats the norm: the step takes 6.46 s instead of 6.43.
    """

    def __init__(self, cfg: Model, rngs, shape, axes, eps: float = 0.0):
        """Declare the weights. eps: if not 0, this is a plain RMSNorm with this eps, whatever the config's norms are.
        """
        dtype = jnp.dtype(cfg.param_dtype)
        self.eps, self.centred, self.axes, self.offset = (eps, False, tuple(axes), 0.0) if eps else (
            cfg.norm_eps, cfg.norm == "layernorm", tuple(axes), cfg.norm_offset)
        self.scale = declare(rngs, dtype, shape, axes, "norm", value=1.0 - self.offset)
        self.bias = declare(rngs, dtype, shape, axes, "bias", value=0.0) if self.centred else None

    def __call__(self, ex: Execution, x, repeats: int = 1):
        """Return the norm of x in the compute dtype.

        repeats: copies of each kv head, as for `Linear`. They matter for a norm over all kv_heads, whose mean they
        leave unchanged.
        """
        dims = tuple(range(-len(self.axes), 0))

        def normed(x, scale, bias):
            y = x.astype(jnp.float32)
            if self.centred:
                y = y - jnp.mean(y, dims, keepdims=True)
            y = y * jax.lax.rsqrt(jnp.mean(y * y, dims, keepdims=True) + self.eps)
            y = y * (scale + self.offset if self.offset else scale)
            return (y if bias is None else y + bias).astype(ex.numerics.dtype)
        bias, scale = (None if w is None else small(ex, *repeated(ex, w[...], self.axes, repeats))
                       for w in (self.bias, self.scale))
        return recomputed(ex, normed)(x, scale, bias)

    def rotates(self, rope: Rope) -> bool:
        """Return whether `rotated` supports this norm with this rope."""
        plain = not self.centred and self.bias is None and len(self.axes) == 1
        return plain and rotation.fits(self.scale[...].shape[-1], 2 * rope.cos.shape[-1])

    def rotated(self, ex: Execution, heads: str, x_BTNH, rope: Rope):
        """Return x after norm and rotary embedding in one kernel. heads: logical axis of x's heads."""
        scale_H = small(ex, self.scale[...], self.axes).astype(jnp.float32) + self.offset
        return normed_and_rotated(ex.layout, heads, self.eps, x_BTNH, scale_H, rope.cos, rope.sin)


# --- embedding -----------------------------------------------------------------------------------------------------

class Embedding(nnx.Module):
    """A table [rows, D] that is looked up by integers [B, T]."""

    def __init__(self, cfg: Model, rngs, rows: int, axes):
        self.axes = tuple(axes)
        self.table = declare(rngs, jnp.dtype(cfg.param_dtype), (rows, cfg.embed_dim), axes, "embedding",
                             std=cfg.embedding_std)

    def __call__(self, ex: Execution, ids_BT):
        x_BTD = lookup(ex, self.axes, self.table[...], ids_BT)
        return ex.layout.act(x_BTD, "batch", "residual_seq", None)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def lookup(ex: Execution, axes, table, ids_BT):
    """Return table[ids] in the compute dtype, with a float32 table gradient.

    A table sharded over embed alone (ZeRO-3) is not gathered. Instead the ids are gathered (B·T int32), every device
    looks up its slice of D for all ids, and an all-to-all of B·T·D/N gives each device whole rows of its sequences. The
    backward is the reverse, and the table's gradient needs no reduction.

    Other tables are gathered over the token axes. Rows sharded over tensor stay sharded. Each device looks up its own
    rows, and an all-reduce of B·T·D adds the results, or a reduce-scatter with sequence parallelism. For rows sharded
    over a manual axis the all-reduce of a device's activations is explicit.
    """
    layout = ex.layout
    if lies_by_columns(layout, axes):
        x_BTD = table.astype(ex.numerics.dtype)[_all_ids(layout, axes, ids_BT)]
        return layout.act(_by_columns(layout, axes, x_BTD), "batch", "seq", None)
    ids_BT = layout.act(ids_BT, "batch", "seq")
    if manual := layout.manual_axes("params", axes[0]):
        ids_BT, mine = _own_rows(manual, table, ids_BT)
    x_BTD = layout.act(gathered(ex, table, axes)[ids_BT], "batch", "seq", None)
    if not manual:
        return x_BTD
    # Constrained like the residual stream before masking. Then a reduce-scatter, not an all-reduce, adds tensor's
    # shards of rows, and only a shard of the sequence is summed here. `mine` is constrained, too; otherwise the ids are
    # split and gathered again. All summands but one are zero, so the sum is exact in any dtype.
    mine, x_BTD = layout.act(mine, "batch", "seq"), layout.act(x_BTD, "batch", "residual_seq", None)
    return psum(jnp.where(mine[..., None], x_BTD, 0), manual)


def _own_rows(manual, table, ids_BT):
    """Return (ids as rows of this device's shard of the table, whether the shard has these rows)."""
    ids_BT = ids_BT - jax.lax.axis_index(manual) * table.shape[0]
    mine = (ids_BT >= 0) & (ids_BT < table.shape[0])
    return jnp.where(mine, ids_BT, 0), mine


def lies_by_columns(layout: Layout, axes) -> bool:
    rows, columns = (layout.mesh_axes("params", axis) for axis in axes)
    return not rows and bool(columns) and set(columns) <= set(layout.batch_axes)


def _all_ids(layout: Layout, axes, ids_BT):
    columns = layout.mesh_axes("params", axes[1])
    return layout.constrain("activations", ids_BT, ("batch", "seq"), drop=columns)


def _by_columns(layout: Layout, axes, x_BTD):
    columns = layout.mesh_axes("params", axes[1])
    batch, seq = layout.spec("activations", ("batch", "seq"), drop=columns)
    return jax.lax.with_sharding_constraint(x_BTD, P(batch, seq, columns))


def _lookup_forward(ex, axes, table, ids_BT):
    # A zero-sized array passes the number of rows to the backward without saving the table.
    return lookup(ex, axes, table, ids_BT), (ids_BT, jnp.zeros((table.shape[0], 0), table.dtype))


def _lookup_backward(ex, axes, saved, dx_BTD):
    ids_BT, rows = saved
    layout = ex.layout
    zeros = jnp.zeros((rows.shape[0], dx_BTD.shape[-1]), jnp.float32)
    if lies_by_columns(layout, axes):
        ids_BT = _all_ids(layout, axes, ids_BT)
        dx_BTD = _by_columns(layout, axes, layout.act(dx_BTD, "batch", "seq", None))
        zeros = layout.constrain("params", zeros, axes)
    else:
        ids_BT = layout.act(ids_BT, "batch", "seq")
        dx_BTD = layout.act(dx_BTD, "batch", "seq", None)
        if manual := layout.manual_axes("params", axes[0]):
            ids_BT, mine = _own_rows(manual, rows, ids_BT)
            dx_BTD = jnp.where(mine[..., None], dx_BTD, 0)
        zeros = layout.constrain(GATHERED, zeros, axes)
    return layout.constrain("grads", zeros.at[ids_BT].add(dx_BTD.astype(jnp.float32)), axes), None


lookup.defvjp(_lookup_forward, _lookup_backward)


# --- attention, MLP, one layer -------------------------------------------------------------------------------------

def kv_heads(layout: Layout, num_kv_heads: int) -> int:
    """Return the number of key/value heads computed over all ranks, at least one per rank.

    It is more than the model has if there are more tensor ranks than heads and the ranks share them evenly. Several
    ranks then compute the same head, each for its own query heads, as in Megatron-LM. The parameters do not change.
    """
    split = layout.mesh_axes("activations", "kv_heads")
    alike = split == layout.mesh_axes("activations", "heads") == layout.mesh_axes("params", "heads")
    num_shards = layout.num_shards(split)
    return num_shards if alike and num_shards > num_kv_heads and num_shards % num_kv_heads == 0 else num_kv_heads


class Attention(nnx.Module):
    """Grouped-query causal attention, by `ex.engines.attention`, with context parallelism if sequences are split.

    mixer: the letter of the layer's mixer. The gate multiplies the output before its projection (arXiv:2505.06708). A
    sink is a score that takes part in a head's softmax and has no value.
    """

    def __init__(self, cfg: Model, rngs, mixer: str):
        D, N, K, H = cfg.embed_dim, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
        self.num_kv_heads, self.mixer, bias = K, mixer, cfg.attention_bias != "none"
        self.mask = Mask(window=cfg.window if mixer in pattern.WINDOWED else 0)
        self.scores = Scores(cfg.multipliers.score, cfg.score_softcap)

        def inward(heads, axis, bias):
            axes = "embed", "heads" if axis == "N" else "kv_heads", "head_dim"
            return Linear(cfg, rngs, f"BTD,D{axis}H->BT{axis}H", (D, heads, H), axes, bias=bias)
        self.query, self.key = inward(N, "N", bias), inward(K, "K", bias)
        self.value = None if cfg.tie_values else inward(K, "K", bias)
        self.out = Linear(cfg, rngs, "BTNH,NHD->BTD", (N, H, D), ("heads", "head_dim", "embed"),
                          bias=cfg.attention_bias == "all", std=(N * H * 2 * cfg.num_layers) ** -0.5)
        self.query_norm, self.key_norm = (self._norm(cfg, rngs, *one) for one in ((N, "heads"), (K, "kv_heads")))
        self.value_eps = cfg.norm_eps if cfg.qk_norm == "head_and_values" else 0.0
        self.gate = inward(N, "N", False) if cfg.attention_gate else None
        self.sinks = declare(rngs, jnp.dtype(cfg.param_dtype), (N,), ("heads",), "bias",
                             value=0.0) if cfg.attention_sinks else None

    @staticmethod
    def _norm(cfg: Model, rngs, heads: int, axis: str):
        if cfg.qk_norm == "off":
            return None
        shape, axes = ((heads, cfg.head_dim), (axis, "head_dim")) if cfg.qk_norm == "all_heads" else (
            (cfg.head_dim,), ("head_dim",))
        return Norm(cfg, rngs, shape, axes)

    def __call__(self, ex: Execution, x_BTD, inputs):
        act, repeats = ex.layout.act, kv_heads(ex.layout, self.num_kv_heads) // self.num_kv_heads
        inward = [(self.query, 1), (self.key, repeats), (self.value, repeats), (self.gate, 1)]
        q_BTNH, k_BTKH, *rest = together(ex, x_BTD, *((linear, n) for linear, n in inward if linear is not None))
        gate_BTNH = rest.pop() if self.gate is not None else None
        q_BTNH = act(q_BTNH, "batch", "seq", "heads", "head_dim")
        k_BTKH = act(k_BTKH, "batch", "seq", "kv_heads", "head_dim")
        v_BTKH = act(rest[0], "batch", "seq", "kv_heads", "head_dim") if rest else k_BTKH
        rope = inputs.rope.get(self.mixer)
        in_one = ex.engines.by_kernels and rope and self.query_norm is not None and self.query_norm.rotates(rope)
        if self.query_norm is not None and not in_one:
            over_heads = len(self.key_norm.axes) > 1
            q_BTNH, k_BTKH = self.query_norm(ex, q_BTNH), self.key_norm(ex, k_BTKH, repeats if over_heads else 1)
        if self.value_eps:
            v_BTKH = recomputed(ex, partial(unit, self.value_eps))(v_BTKH)
        if rope:
            if in_one:
                q_BTNH = self.query_norm.rotated(ex, "heads", q_BTNH, rope)
                k_BTKH = self.key_norm.rotated(ex, "kv_heads", k_BTKH, rope)
            else:
                q_BTNH, k_BTKH = rotate(q_BTNH, rope), rotate(k_BTKH, rope)
            q_BTNH = grown(q_BTNH, rope)
            q_BTNH = act(q_BTNH, "batch", "seq", "heads", "head_dim")
            k_BTKH = act(k_BTKH, "batch", "seq", "kv_heads", "head_dim")
            if self.query_norm is None:     # with a norm, remat would also keep the norm's input
                q_BTNH, k_BTKH = (checkpoint_name(x, "attention_rotated") for x in (q_BTNH, k_BTKH))
        sinks_N = None if self.sinks is None else small(ex, self.sinks[...], ("heads",)).astype(jnp.float32)
        with jax.named_scope("attention"):      # kernels of attention are found by this name in the compiled program
            o_BTNH, bound_N = ex.engines.attention(
                ex.layout, q_BTNH, k_BTKH, v_BTKH, inputs.segments_BT, mask=self.mask, scores=self.scores,
                sinks_N=sinks_N, bounded=ex.bounds is not None)
        o_BTNH = act(o_BTNH, "batch", "seq", "heads", "head_dim")
        if gate_BTNH is not None:
            gate_BTNH = act(gate_BTNH, "batch", "seq", "heads", "head_dim")
            o_BTNH = recomputed(ex, gated)(o_BTNH, gate_BTNH)
        return self.out(ex, o_BTNH, out_axes=("batch", "seq", None)), bound_N


def gated(o, gate):
    """Return o · sigmoid(gate), computed in float32, in o's dtype."""
    return (o.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(o.dtype)


def unit(eps: float, x):
    """Return the RMSNorm of x over the last dim, without a weight."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)).astype(x.dtype)


GATE_UP = "mlp_gate_up"         # name of the gate and up projections' outputs in remat policies


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def fused_mlp(ex: Execution, axes, x_BTD, ws):
    """Return the MLP's output [B, T, D], computed by the fused kernels of `ex.engines.mlp`.

    ws: gate, up and down weights; axes: their logical axes. Gathers and gradients are placed as in `project`.
    """
    return _fused_mlp_forward(ex, axes, x_BTD, ws)[0]


def _fused_mlp_forward(ex, axes, x_BTD, ws):
    full = tuple(gathered(ex, *of_one) for of_one in zip(ws, axes, strict=True))
    *gate_up, h_BTF = ex.engines.mlp.forward(ex.layout, x_BTD, *full[:2])
    gate_up = [checkpoint_name(y_BTF, GATE_UP) for y_BTF in gate_up]
    y_BTD = products.einsum("BTF,FD->BTD", h_BTF, full[2])
    return y_BTD, (x_BTD, ws if ex.numerics.remat == "none" else full, gate_up)


def _fused_mlp_backward(ex, axes, saved, dy_BTD):
    x_BTD, ws, gate_up = saved
    gate, up, down = [gathered(ex, *of_one) for of_one in zip(ws, axes)] if ex.numerics.remat == "none" else ws
    *grads, h_BTF = ex.engines.mlp.backward(ex.layout, dy_BTD, down, *gate_up)
    of_gate, of_up = (products.einsum("BTF,DF->BTD", d_BTF, w_DF) for d_BTF, w_DF in zip(grads, (gate, up)))
    dws = [products.einsum("BTD,BTF->DF", x_BTD, d_BTF, jnp.float32) for d_BTF in grads]
    dws.append(products.einsum("BTF,BTD->FD", h_BTF, dy_BTD, jnp.float32))
    # as in `project`: cuBLAS accumulates the second matmul into the first
    return of_up + of_gate, tuple(map(partial(_placed, ex), dws, axes))


fused_mlp.defvjp(_fused_mlp_forward, _fused_mlp_backward)


class MLP(nnx.Module):
    """The inward projections, the activation and the outward projection. width: replaces mlp_dim if it is not 0."""

    def __init__(self, cfg: Model, rngs, width: int = 0):
        D, F, bias = cfg.embed_dim, width or cfg.mlp_dim, cfg.mlp_bias
        self.activation = ACTIVATIONS[cfg.activation]
        self.gate = Linear(cfg, rngs, "BTD,DF->BTF", (D, F), ("embed", "mlp"), bias=bias) if cfg.gated else None
        self.up = Linear(cfg, rngs, "BTD,DF->BTF", (D, F), ("embed", "mlp"), bias=bias)
        self.down = Linear(cfg, rngs, "BTF,FD->BTD", (F, D), ("mlp", "embed"), bias=bias,
                           std=(F * 2 * cfg.num_layers) ** -0.5)

    def __call__(self, ex: Execution, x_BTD):
        act = ex.layout.act
        if ex.engines.mlp is not None and ex.engines.mlp.fits(self.up.kernel[...].shape[1]):
            linears = [linear for linear in (self.gate, self.up, self.down) if linear is not None]
            return fused_mlp(ex, tuple(linear.axes for linear in linears), x_BTD,
                             tuple(linear.kernel[...] for linear in linears))
        inward = [linear for linear in (self.up, self.gate) if linear is not None]
        up_BTF, *gate = (act(y, "batch", "seq", "mlp")
                         for y in together(ex, x_BTD, *((linear, 1) for linear in inward)))
        gate_BTF = gate[0] if gate else None

        def down(gate_BTF, up_BTF):
            h_BTF = self.activation(up_BTF) if gate_BTF is None else self.activation(gate_BTF, up_BTF)
            return self.down(ex, act(h_BTF, "batch", "seq", "mlp"), out_axes=("batch", "seq", None))
        return recomputed(ex, down)(gate_BTF, up_BTF)


class Layer(nnx.Module):
    """Residual block of a mixer and an MLP, either of which may be absent. Norms are before them, after them, or both.

    mixer, mlp: (name, (cfg, rngs) -> module), or None. The name is that in the parameter tree: attention or linear, mlp
    or moe. The norms around any mixer are named attention_norm and attention_post_norm.

    Returns (x_BTD, `LayerStats` of the microbatch).
    """

    def __init__(self, cfg: Model, rngs, mixer: tuple[str, Callable] | None, mlp: tuple[str, Callable] | None):
        def norm(part, where):
            wanted = part is not None and cfg.norm_placement in (where, "both")
            return Norm(cfg, rngs, (cfg.embed_dim,), ("embed",)) if wanted else None

        def part(given, name):
            return given[1](cfg, rngs) if given and given[0] == name else None
        self.dropout, self.residual_multiplier = cfg.residual_dropout, cfg.multipliers.residual
        self.attention_norm = norm(mixer, "before")
        self.attention, self.linear = part(mixer, "attention"), part(mixer, "linear")
        self.attention_post_norm = norm(mixer, "after")
        self.mlp_norm, self.mlp_post_norm = norm(mlp, "before"), norm(mlp, "after")
        self.mlp, self.moe = part(mlp, "mlp"), part(mlp, "moe")
        self.layer_scale = declare(rngs, jnp.dtype(cfg.param_dtype), (1,), (None,), "norm",
                                   value=1.0) if cfg.layer_scale else None

    def __call__(self, ex: Execution, x_BTD, inputs, number):
        def residual(y):
            return ex.layout.act(y, "batch", "residual_seq", None)

        def normed(norm, x_BTD):
            return x_BTD if norm is None else norm(ex, x_BTD)
        mixer, stats = self.linear if self.attention is None else self.attention, LayerStats()
        if mixer is not None:
            h_BTD = self._full(ex, normed(self.attention_norm, x_BTD))
            y_BTD = mixer(ex, h_BTD, inputs)
            if self.attention is not None:
                y_BTD, bound_N = y_BTD
                if bound_N is not None and ex.bounds is not None:
                    stats = LayerStats.of("step", **{SCORE_BOUND: in_row(number, bound_N, *ex.bounds)})
            y_BTD = normed(self.attention_post_norm, residual(y_BTD))
            x_BTD = residual(self._added(x_BTD, dropout(ex, y_BTD, self.dropout, inputs, 2 * number)))
            if self.attention_post_norm is None:
                x_BTD = checkpoint_name(x_BTD, "attention_stream")
        if self.mlp is not None and ex.early and not ex.in_parts and not self.mlp.down.frozen:
            x_BTD, self.mlp.down.kernel[...] = released(x_BTD, self.mlp.down.kernel[...])
        if self.mlp is not None or self.moe is not None:
            h_BTD = normed(self.mlp_norm, x_BTD)
            if self.mlp is not None:
                y_BTD = self.mlp(ex, self._full(ex, h_BTD))
            elif self.moe is not None:
                y_BTD, of_experts = self.moe(ex, residual(h_BTD), inputs, number)
                stats |= of_experts
            y_BTD = normed(self.mlp_post_norm, residual(y_BTD))
            x_BTD = residual(self._added(x_BTD, dropout(ex, y_BTD, self.dropout, inputs, 2 * number + 1)))
        if self.layer_scale is not None:
            # A constant of the model. It gets no gradient, so no optimizer changes it.
            scale = jax.lax.stop_gradient(small(ex, self.layer_scale[...], (None,)))
            x_BTD = (x_BTD.astype(jnp.float32) * scale).astype(x_BTD.dtype)
        return x_BTD, stats

    def _added(self, x_BTD, y_BTD):
        if self.residual_multiplier == 1:
            return x_BTD + y_BTD
        # In float32: 0.22 in bfloat16 is 0.2% more.
        sum_BTD = x_BTD.astype(jnp.float32) + self.residual_multiplier * y_BTD.astype(jnp.float32)
        return sum_BTD.astype(x_BTD.dtype)

    @staticmethod
    def _full(ex: Execution, h_BTD):
        """Constrain h to the sequence shard, then to the whole sequence.

        The gather (B·T·D bytes × 2) is then in bf16, not float32. Inputs of float8 projections stay split. They are
        gathered when they are quantized.
        """
        h_BTD = ex.layout.act(h_BTD, "batch", "residual_seq", None)
        return h_BTD if ex.numerics.float8 else ex.layout.act(h_BTD, "batch", "seq", None)


@jax.custom_vjp
def released(x, w):
    """Return x and w unchanged. In the backward, the gradient of x waits for the reduced gradient of w.

    Otherwise XLA delays a layer's weight gradients to the end of its backward, where the last reduce-scatter overlaps
    with nothing, and copies the stream's cotangent for them. If the gradient of the MLP's outward projection is
    computed early, the others are early as well, and the last one is small. By the roofline a step of llama3-8b on 8
    H100 takes 6.47 s instead of 6.50; with remat full it takes 7.60 s instead of 7.64.
    """
    return x, w


released.defvjp(lambda x, w: ((x, w), None), lambda _, cotangents: jax.lax.optimization_barrier(cotangents))


def in_row(number, values_N, rows: int, width: int):
    """Return [rows, width]: the values in row `number`, zeros elsewhere."""
    mine = jnp.arange(rows)[:, None] == number
    return jnp.where(mine, jnp.pad(values_N, (0, width - values_N.shape[0])), 0.0)


# --- dropout --------------------------------------------------------------------------------------------------------

def dropout(ex: Execution, x_BTD, rate: float, inputs, site):
    """Zero elements with probability `rate`.

    The bits depend on (seed, step, site, global sequence, index, feature) alone. Each token's key is hashed locally, so
    no layout, split or manual region changes them, and nothing is communicated.
    """
    if rate == 0.0 or inputs.dropout_key is None:
        return x_BTD
    key = jax.random.fold_in(inputs.dropout_key, site)
    index_BT = ex.layout.act(inputs.index_BT, "batch", "residual_seq")
    token = jax.vmap(lambda s, row: jax.vmap(lambda t: jax.random.fold_in(jax.random.fold_in(key, s), t))(row))
    keys_BT = token(inputs.sequence_B, index_BT)
    bits = jax.vmap(jax.vmap(lambda k: jax.random.bits(k, x_BTD.shape[-1:], jnp.uint32)))(keys_BT)
    bits = ex.layout.act(bits, "batch", "residual_seq", None)
    # Divided in float32: 1 - 0.1 in bfloat16 would scale every expectation by 1.0017.
    kept = (x_BTD.astype(jnp.float32) / (1 - rate)).astype(x_BTD.dtype)
    return jnp.where(bits >= jnp.uint32(rate * 2**32), kept, 0)
