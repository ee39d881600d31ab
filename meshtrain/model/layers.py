"""Linear, Norm and Embedding, and the weight einsum of all projections.

Dims (for the whole project): B batch, T query position, S key position, D model, N heads, K kv-heads, G=N/K, H head
size, F mlp, E experts, V vocabulary, L layers, P stages, M microbatches. A tensor's suffix is its shape. Layers ask
`ex.layout` for shardings by logical axes; they know no mesh axis. These constraints and the explicit backward of
`project` decide which collectives a GPU runs, and in which dtype. The reasons are given at each place.
"""
from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from meshtrain.config.sections import Model
from meshtrain.kernels import products, rotation
from meshtrain.model import float8, input_gradient
from meshtrain.model.execution import Execution, recompute
from meshtrain.model.params import declare
from meshtrain.model.rope import Rope, norm_and_rotate
from meshtrain.sharding import reduced
from meshtrain.sharding.mesh import psum
from meshtrain.sharding.rules import GATHERED, Layout


# --- the weight einsum ---------------------------------------------------------------------------------------------

def gather_weight(ex: Execution, w: jax.Array, axes) -> jax.Array:
    """Return the weight in the compute dtype, gathered over the axes that split tokens (ZeRO-3). Tensor sharding stays.

    The gather moves (N-1)/N of the weight's bytes in the compute dtype. The weight is first constrained to its shards,
    because XLA otherwise sometimes gathers the float32 master weight and casts it afterwards.
    """
    if ex.in_parts:
        return w.astype(ex.numerics.dtype)       # `parts.share` gathers once for all parts
    w = ex.layout.constrain("params", w.astype(ex.numerics.dtype), axes)
    return ex.layout.constrain(GATHERED, w, axes)


def place_gradient(ex: Execution, dw, axes):
    """Return a weight's gradient sharded as in [grads].

    If the microbatch is split into parts, the gradient is returned unchanged, because `parts.share` shards the sum."""
    return dw if ex.in_parts else reduced.place(ex.layout, dw, axes)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def project(ex: Execution, forms, out_axes, frozen: bool, x, ws):
    """Return einsum(eq, x, w) in ex.numerics.dtype for each w of ws, with float32 weight gradients.

    forms: ((eq, logical axes of w), …), e.g. "BTD,DNH->BTNH". out_axes: for a single projection back onto the residual
    stream, the output's logical axes before it is split over the sequence; None for other projections. GPUs reduce a
    weight gradient in the dtype of its dot. So the dot here has a float32 result, sharded as in [grads]. Frozen weights
    get no gradient, and x is not saved for them.
    """
    return tuple(products.einsum(eq, x, gather_weight(ex, w, axes)) for (eq, axes), w in zip(forms, ws, strict=True))


def _project_forward(ex: Execution, forms, out_axes, frozen, x, ws):
    full = [gather_weight(ex, w, axes) for (_, axes), w in zip(forms, ws, strict=True)]
    # With remat the gathered weight lives only inside the recomputed layer. Without remat, saving it would hold all
    # layers' gathered weights until the backward, so the shard is saved and gathered again.
    ys = tuple(products.einsum(eq, x, w) for (eq, _), w in zip(forms, full))
    return ys, (None if frozen else x, ws if ex.numerics.remat == "none" else tuple(full))


def _project_backward(ex: Execution, forms, out_axes, frozen, saved, dys):
    x, ws = saved
    dx: input_gradient.Sums = {}
    dws = []
    over = input_gradient.list_sum_axes(ex.layout, forms)
    dys = input_gradient.place_cotangents(ex.layout, forms, over, dys)
    for (eq, axes), w, dy, summed in reversed([*zip(forms, ws, dys, over, strict=True)]):
        if out_axes:
            if ex.layout.sequence_parallel:
                # Sequence parallel: gather the cotangent once, for dx and dw. The barrier is REQUIRED. Without it XLA
                # rewrites later uses of the shard to gather + slice, and a GPU pass turns that into a
                # collective-permute without pairs, which outputs zeros (openxla/xla 45218, 47083). CPU programs are
                # correct without it.
                dy = jax.lax.optimization_barrier(dy)
            dy = ex.layout.act(dy, *out_axes)
        full = gather_weight(ex, w, axes) if ex.numerics.remat == "none" else w
        operands, out = eq.split("->")
        left, right = operands.split(",")
        product = products.einsum(f"{out},{right}->{left}", dy, full, dy.dtype if x is None else x.dtype)
        dx = input_gradient.add(dx, summed, product)
        if not frozen:
            # A router has a float32 cotangent and narrower inputs. Its gradient stays float32.
            dtype = reduced.dtype_of(ex.layout) if x.dtype == dy.dtype else jnp.float32
            dw = products.einsum(f"{left},{out}->{right}", x, dy, dtype)
            dws.append(place_gradient(ex, dw, axes))
    return input_gradient.total(ex.layout, dx), tuple(dws[::-1]) or (None,) * len(forms)


project.defvjp(_project_forward, _project_backward)


class Linear(nnx.Module):
    """A weight of any shape, with an optional bias over its output dims. `model.lora` may freeze and adapt it."""

    def __init__(self, cfg: Model, rngs: nnx.Rngs, eq: str, shape, axes, *, bias=False, std=None, role="matrix"):
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

    def bias_output(self, ex: Execution, y, repeats: int):
        if self.bias is None:
            return y
        bias, axes = repeat_heads(ex, self.bias[...], self.bias_axes, repeats)
        return add_bias(ex, axes, y, bias)


def together(ex: Execution, x, *linears: tuple[Linear, int], out_axes=None) -> list:
    """Return the outputs for one x of all pairs (Linear, repeats). In float8, x is quantized and gathered only once."""
    weights = [repeat_heads(ex, linear.kernel[...], linear.axes, repeats) for linear, repeats in linears]
    forms = tuple((linear.eq, axes) for (linear, _), (_, axes) in zip(linears, weights))
    frozen = linears[0][0].frozen
    multiply = float8.project if ex.numerics.float8 else project
    adapted = not out_axes and any(linear.lora is not None for linear, _ in linears)    # by whole matrices, too

    def read():
        return input_gradient.branch(ex.layout, x) if adapted else x
    ys = multiply(ex, forms, out_axes, frozen, read(), tuple(w for w, _ in weights))
    ys = [y if linear.lora is None else linear.lora(ex, read(), y, repeats, out_axes)
          for (linear, repeats), y in zip(linears, ys)]
    return [linear.bias_output(ex, y, repeats) for (linear, repeats), y in zip(linears, ys)]


def repeat_heads(ex: Execution, w, axes, repeats: int):
    """Return (w with each kv head repeated `repeats` times, the logical axes of the result).

    Copies are adjacent, so that query groups stay together.

    The copies are sharded like heads before the gather: each tensor rank takes its head of the unsharded w, and no data
    moves. In the backward, the gradients of each head are summed over ranks in float32, and each rank gets all heads.
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


def _add_bias_backward(ex: Execution, axes, _, dy):
    # Only the sum is float32. The cotangent stays in the compute dtype for later matmuls.
    db = jnp.sum(dy, range(dy.ndim - len(axes)), dtype=jnp.float32)
    return dy, place_gradient(ex, db, axes)


add_bias.defvjp(lambda *given: (add_bias(*given), None), _add_bias_backward)


def small(ex: Execution, vector, axes):
    """Return a norm scale or bias in float32, gathered over the axes that split tokens (few bytes)."""
    return ex.layout.constrain(GATHERED, vector, axes)


class Norm(nnx.Module):
    """RMSNorm or LayerNorm over the last dims (the dims of its weights). Computes in float32, returns the compute
    dtype.

    Tried and rejected: one kernel for the backward of the norm and the residual stream. By the roofline this kernel
    takes 53 ms of a step of llama3-8b on 8 H100, and XLA's two kernels take 93 ms: 26 ms of it read x and its cotangent
    for the sums over a row, and the rest reads them again. But XLA then copies x out of its stack and repeats the norm:
    the step takes 6.46 s instead of 6.43.
    """

    def __init__(self, cfg: Model, rngs: nnx.Rngs, shape, axes, eps: float = 0.0):
        """Declare the weights. eps: if not 0, the eps of a plain RMSNorm that replaces the norm of the config."""
        dtype = jnp.dtype(cfg.param_dtype)
        self.eps, self.centred, self.axes, self.offset = (eps, False, tuple(axes), 0.0) if eps else (
            cfg.norm_eps, cfg.norm == "layernorm", tuple(axes), cfg.norm_offset)
        self.scale = declare(rngs, dtype, shape, axes, "norm", value=1.0 - self.offset)
        self.bias = declare(rngs, dtype, shape, axes, "bias", value=0.0) if self.centred else None

    def __call__(self, ex: Execution, x, repeats: int = 1):
        """Return the norm of x in the compute dtype.

        repeats: copies of each kv head, as for `Linear`. In a norm over all kv_heads, the copies leave the mean
        unchanged.
        """
        dims = tuple(range(-len(self.axes), 0))

        def normalize(x, scale, bias):
            y = x.astype(jnp.float32)
            if self.centred:
                y = y - jnp.mean(y, dims, keepdims=True)
            y = y * jax.lax.rsqrt(jnp.mean(y * y, dims, keepdims=True) + self.eps)
            y = y * (scale + self.offset if self.offset else scale)
            return (y if bias is None else y + bias).astype(ex.numerics.dtype)
        bias, scale = (None if w is None else small(ex, *repeat_heads(ex, w[...], self.axes, repeats))
                       for w in (self.bias, self.scale))
        return recompute(ex, normalize)(x, scale, bias)

    def rotates(self, rope: Rope) -> bool:
        """Return whether `norm_and_rotate` supports this norm with this rope."""
        plain = not self.centred and self.bias is None and len(self.axes) == 1
        return plain and rotation.fits(self.scale[...].shape[-1], 2 * rope.cos.shape[-1])

    def norm_and_rotate(self, ex: Execution, heads: str, x_BTNH, rope: Rope):
        """Return x after norm and rotary embedding, computed by one kernel. heads: the logical axis of x's heads."""
        scale_H = small(ex, self.scale[...], self.axes).astype(jnp.float32) + self.offset
        return norm_and_rotate(ex.layout, heads, self.eps, x_BTNH, scale_H, rope.cos, rope.sin)


# --- embedding -----------------------------------------------------------------------------------------------------

class Embedding(nnx.Module):
    """A table [rows, D] that is looked up by integers [B, T]."""

    def __init__(self, cfg: Model, rngs: nnx.Rngs, rows: int, axes):
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
    x_BTD = layout.act(gather_weight(ex, table, axes)[ids_BT], "batch", "seq", None)
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


def _lookup_forward(ex: Execution, axes, table, ids_BT):
    # A zero-sized array passes the number of rows to the backward without saving the table.
    return lookup(ex, axes, table, ids_BT), (ids_BT, jnp.zeros((table.shape[0], 0), table.dtype))


def _lookup_backward(ex: Execution, axes, saved, dx_BTD):
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
        if (dtype := reduced.dtype_of(layout)) != jnp.float32:
            return reduced.place(layout, reduced.add(_by_shard(layout, axes, zeros, ids_BT, dx_BTD), (0,), dtype),
                                 axes), None
    return layout.constrain("grads", zeros.at[ids_BT].add(dx_BTD.astype(jnp.float32)), axes), None


def _by_shard(layout: Layout, axes, zeros, ids_BT, dx_BTD):
    """Return the table's gradient [n, rows, D] in float32, a summand for each of the n token shards. XLA would reduce
    their sum in its dtype, which must be float32."""
    batch, seq = (layout.mesh_axes("activations", name) for name in ("batch", "seq"))
    b, c = layout.num_shards(batch), layout.num_shards(seq)

    def cut(x):
        x = jnp.moveaxis(x.reshape(b, x.shape[0] // b, c, x.shape[1] // c, *x.shape[2:]), 2, 1)
        return jax.lax.with_sharding_constraint(x.reshape(b * c, -1, *x.shape[4:]), P(batch + seq))
    pinned = P(batch + seq, *layout.spec(GATHERED, axes))
    zeros = jax.lax.with_sharding_constraint(jnp.broadcast_to(zeros, (b * c, *zeros.shape)), pinned)
    dw = jax.vmap(lambda w, ids, dx: w.at[ids].add(dx))(zeros, cut(ids_BT), cut(dx_BTD).astype(jnp.float32))
    return jax.lax.with_sharding_constraint(dw, pinned)


lookup.defvjp(_lookup_forward, _lookup_backward)


# --- heads and elementwise functions --------------------------------------------------------------------------------

def kv_heads(layout: Layout, num_kv_heads: int) -> int:
    """Return the number of key/value heads computed over all ranks, at least one per rank.

    The number is larger than num_kv_heads if there are more tensor ranks than kv heads and the ranks can share the
    heads evenly. Several ranks then compute the same head, each for its own query heads, as in Megatron-LM. The
    parameters do not change.
    """
    split = layout.mesh_axes("activations", "kv_heads")
    alike = split == layout.mesh_axes("activations", "heads") == layout.mesh_axes("params", "heads")
    num_shards = layout.num_shards(split)
    return num_shards if alike and num_shards > num_kv_heads and num_shards % num_kv_heads == 0 else num_kv_heads


def apply_gate(o, gate):
    """Return o · sigmoid(gate), computed in float32, in o's dtype."""
    return (o.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(o.dtype)


def unit(eps: float, x):
    """Return the RMSNorm of x over the last dim, without a weight."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)).astype(x.dtype)
