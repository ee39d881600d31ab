"""Attention over sequences that are split over `context`, as a function of any arrays.

The function uses the trainer's methods (`parallel.context.attention`) and engines (`choices.attention`). Forward and
backward are explicit: jax differentiates neither. A ring computes in zigzag order. If arrays are in natural order, each
call sends queries, keys, values and the output over `context` once more; arrays in the order of `token_order` are not
sent.
"""
from __future__ import annotations

import functools
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain import hardware
from meshtrain.choices import attention as choice
from meshtrain.choices.setting import Place
from meshtrain.config import ConfigError
from meshtrain.kernels.engine import Mask
from meshtrain.library.layouts import Layout
from meshtrain.names import AXES
from meshtrain.parallel.context import zigzag
from meshtrain.parallel.context.attention import METHODS
from meshtrain.parallel.context.zigzag import AXIS
from meshtrain.sharding import rules
from meshtrain.sharding.logical import nearest
from meshtrain.sharding.mesh import automatic_axes

# Keys of run files in the messages of `choices.attention` -> the words of a caller from Python.
WORDS = {"data.seq_len=": "T=", "model.num_heads=": "N=", "model.window=": "window=", "context.method=": "method=",
         "not model.compute_dtype=": "not ", "data.document_mask=true": "segments are given"}


def ring_attention(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKV: jax.Array, segments_BT: jax.Array | None = None, *,
                   layout: Layout, method: str = "ring", causal: bool = True, window: int = 0,
                   in_order: bool = False) -> jax.Array:
    """Return attention [B, T, N, V] in the dtype of the queries, differentiable once with respect to q, k and v.

    N is a multiple of K. segments_BT: int [B, T]; a token attends to tokens of its own segment; None: a row is one
    segment. method: "ring", "gather" or "ulysses", as `context.method` of a run, without effect if there is no context
    parallelism. window: the number of tokens that a token attends to, including itself; 0: all. in_order: whether the
    arrays and the result are in the order of `token_order`, not in natural order.

    Call it in the mesh of the layout: `with jax.set_mesh(layout.mesh): …`. Raises: ConfigError with every fault.

    >>> layout, q = mt.Layout("ddp", {"context": 4}), np.ones((2, 16, 4, 8), np.float32)
    >>> with jax.set_mesh(layout.mesh):
    ...     mt.ring_attention(q, q, q, layout=layout).shape
    (2, 16, 4, 8)
    """
    check_layout(layout, "ring_attention")
    axes = layout.inner
    _check_call(layout, method, causal, window)
    _check_arrays(axes, q_BTNH, k_BTKH, v_BTKV, segments_BT)
    B, T, N, H = q_BTNH.shape
    heads = choice.Heads(N, k_BTKH.shape[2], H, v_BTKV.shape[3])
    need = choice.Need(q_BTNH.dtype.name, (heads,), T, method, window if window < T else 0,
                       documents=segments_BT is not None)
    if faults := choice.find_problems(need, axes):
        raise ConfigError(*map(_reword, faults))
    device = layout.mesh.devices.flat[0]
    place = Place(axes, device.platform, hardware.from_device_kind(device.device_kind))
    name, reasons = choice.choose_engine(need, place)
    if name == "blockwise" and reasons:
        _warn_once(_reword(f"ring_attention: {choice.LABELS[name]}, because {'; '.join(reasons)}"))
    operands = (q_BTNH, k_BTKH, v_BTKV, jnp.ones((B, T), jnp.int32) if segments_BT is None else segments_BT)
    attend = partial(choice.build(name, need, place), axes, mask=Mask(causal, window))
    if in_order or not _is_permuted(axes, method):
        return attend(*operands)[0]
    dims = ("heads", None), ("kv_heads", None), ("kv_heads", None), ()
    o_BTNV, _ = attend(*(_reorder(axes, of, True, x) for of, x in zip(dims, operands)))
    return _reorder(axes, dims[0], False, o_BTNV)


def token_order(length: int, layout: Layout, method: str = "ring") -> np.ndarray:
    """Return the token at each position of rows that `ring_attention` takes `in_order`, int64 [length].

    A data loader permutes tokens, targets, positions and segments by this order: `x[:, order]`. Code between two calls
    of `ring_attention` then needs no other order. Raises: ConfigError for a length that does not divide evenly, or an
    unknown method.

    >>> mt.token_order(8, mt.Layout("ddp", {"context": 2})).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    check_layout(layout, "token_order")
    _check_method(method)
    if not _is_permuted(layout.inner, method):
        return np.arange(length)
    chunks = 2 * layout.inner.sizes[AXIS]
    if length % chunks:
        raise ConfigError(f"T={length} cannot be split into 2 × mesh.context = {chunks} chunks of equal length; use a "
                          f"multiple of {chunks}, e.g. {-(-length // chunks) * chunks}")
    return METHODS[method].order(length, layout.inner.sizes[AXIS])


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _reorder(axes: rules.Layout, dims: tuple[str | None, ...], into: bool, x_BT):
    """Return x [B, T, …] with its tokens moved from natural into zigzag order, or back. dims: logical axes after T.
    Each device sends its tokens once over `context`."""
    spec = axes.spec("activations", ("batch", "seq", *dims))
    return jax.shard_map(zigzag.from_natural if into else zigzag.to_natural, in_specs=spec, out_specs=spec,
                         axis_names=set(automatic_axes()), check_vma=False)(x_BT)


def _reorder_backward(axes, dims, into, _, dx_BT):
    return (None if dx_BT.dtype == jax.dtypes.float0 else _reorder(axes, dims, not into, dx_BT),)


_reorder.defvjp(lambda *given: (_reorder(*given), None), _reorder_backward)


def _is_permuted(axes: rules.Layout, method: str) -> bool:
    return axes.sizes[AXIS] > 1 and method != "ulysses"


def check_layout(layout: object, name: str) -> None:
    """Check that the argument is a layout and not, for example, a mesh. name: the calling function, for the message.
    Raises: ConfigError."""
    if not isinstance(layout, Layout):
        axes = f" with the axes {', '.join(layout.axis_names)}" if isinstance(layout, jax.sharding.Mesh) else ""
        raise ConfigError(f"{name}: layout is a {type(layout).__name__}{axes}; pipelines and rings take a layout, "
                          f"whose mesh has the axes {', '.join(AXES)}, e.g. mt.Layout(\"ddp\", {{\"stage\": 4}})")


def _check_method(method: str) -> None:
    if method not in METHODS:
        raise ConfigError(f"method={method!r} is not a method{nearest(str(method), METHODS)}; use "
                          f"{' or '.join(map(repr, METHODS))}")


def _check_call(layout: Layout, method: str, causal: bool, window: int) -> None:
    """Check the arguments and the context of a call. Raises: ConfigError if the attention cannot be computed."""
    _check_method(method)
    faults, sizes, here = [], layout.inner.sizes, jax.sharding.get_abstract_mesh()
    if window < 0 or window and not causal:
        faults.append(f"window={window} with causal={causal}: a window is the number of tokens up to a token, itself "
                      f"included; give window ≥ 0 and causal=True, or no window")
    if not causal and _is_permuted(layout.inner, method):
        faults.append(f'method={method!r} computes causal attention only; use method="ulysses" for causal=False, or a '
                      f"mesh without context")
    if any(n > 1 for n in sizes.values()) and dict(here.shape) != dict(layout.mesh.shape):
        what = f"the mesh {dict(here.shape)} is" if here.shape else "no mesh is"
        faults.append(f"ring_attention: {what} in context, but the layout's mesh is {dict(layout.mesh.shape)}; call "
                      f"the jitted function within `with jax.set_mesh(layout.mesh):`")
    elif AXIS in here.manual_axes and sizes[AXIS] > 1:
        faults.append(f"ring_attention: {AXIS} is a manual axis here; call it outside of a shard_map over {AXIS}")
    if faults:
        raise ConfigError(*faults)


def _check_arrays(axes: rules.Layout, q, k, v, segments) -> None:
    """Check shapes and dtypes. Raises: ConfigError if they do not fit one another or the layout."""
    named = {"q": q, "k": k, "v": v}
    if wrong := [f"{name} {x.dtype.name}{list(x.shape)}" for name, x in named.items()
                 if x.ndim != 4 or not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype != q.dtype]:
        raise ConfigError(f"ring_attention: {', '.join(wrong)}: q, k and v are arrays [B, T, heads, width] of one "
                          f"floating dtype")
    faults, (B, T, N, H), K = [], q.shape, k.shape[2]
    if k.shape != (B, T, K, H) or v.shape[:3] != (B, T, K) or N % K:
        faults.append(f"ring_attention: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)} do not fit: q is [B, "
                      f"T, N, H], k [B, T, K, H], v [B, T, K, V], and N is a multiple of K")
    if segments is not None and (segments.shape != (B, T) or not jnp.issubdtype(segments.dtype, jnp.integer)):
        faults.append(f"ring_attention: segments {segments.dtype.name}{list(segments.shape)} must be integers "
                      f"{[B, T]}: the number of each token's document")
    sizes = dict(axes.sizes) | dict.fromkeys(jax.sharding.get_abstract_mesh().manual_axes, 1)
    split = [rules.Tensor("activations", "q", q.shape, ("batch", None, "heads", None)),
             rules.Tensor("activations", "k", k.shape, ("batch", None, "kv_heads", None))]
    faults += rules.problems(axes.rules, sizes, split)
    if faults:
        raise ConfigError(*faults)


def _reword(message: str) -> str:
    for key, word in WORDS.items():
        message = message.replace(key, word)
    return message


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)
