"""Compare every attention engine on a device with attention over whole scores in float32 on the CPU: forward and
backward, for each kind of block.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_record import Item
from meshtrain import hardware
from meshtrain.kernels import blockwise, cudnn, mosaic, pallas, tiles
from meshtrain.kernels.engine import CAUSAL, MASKED, WHOLE, Engine, Mask
from meshtrain.kernels.tiles import Tiles

DTYPE = jnp.bfloat16
# Share of the largest number of a result: o, p and ds are rounded to 8 bits (2^-9 of each number) before they are
# summed.
TOLERANCE = 1e-2
SMALLEST = 0.1          # smallest value that counts as a largest number, for results that are nearly zero


class Sizes(NamedTuple):
    """queries, other_keys: lengths that no tile divides. widths: of keys and of values; the last pair is that of latent
    attention."""
    rows: int = 2
    queries: int = 1400
    other_keys: int = 900
    heads: int = 8
    kv_heads: int = 2
    widths: tuple[tuple[int, int], ...] = ((128, 128), (64, 64), (256, 256), (192, 128))
    tiles: Tiles | None = None      # instead of the tiles in the table
    block: int = blockwise.BLOCK


class Case(NamedTuple):
    """Segments [B, T] of queries and [B, S] of keys."""
    name: str
    q_segments: np.ndarray
    k_segments: np.ndarray
    mask: Mask


def documents(rng, rows: int, length: int, mean: float) -> np.ndarray:
    """Return int32 [rows, length]: the number of each token's document, from 1."""
    return (1 + np.cumsum(rng.random((rows, length)) < 1 / mean, 1)).astype(np.int32)


def cases(sizes: Sizes, with_documents: bool) -> Iterator[Case]:
    """Yield the inputs of a device without context parallelism, and its inputs from ring and gather for a split
    sequence. They have only two shapes, because compilation takes most of the time."""
    rng, (B, T, S) = np.random.default_rng(0), sizes[:3]

    def ones(length: int) -> np.ndarray:
        return np.ones((B, length), np.int32)
    yield Case("whole rows", ones(T), ones(T), CAUSAL._replace(documents=with_documents))
    yield Case("an earlier chunk", ones(T), ones(S), WHOLE._replace(documents=with_documents))
    if not with_documents:
        return
    packed = documents(rng, B, T, T / 5)
    yield Case("documents", packed, packed, CAUSAL)
    near = CAUSAL._replace(window=T // 7)
    yield Case("documents within a window", packed, packed, near)
    yield Case("an earlier chunk at the window's edge", ones(T), ones(S), near._replace(causal=False, ahead=T // 16))
    line = documents(rng, B, T + S, T / 3)
    line[1, S + 5:] = 0                                              # padding after the last document
    yield Case("documents over two chunks", line[:, S:], line[:, :S], WHOLE)
    # new documents begin after the hidden tokens, so that the tokens of each document are contiguous
    blind, unseen = ((packed + np.where(np.arange(T) < T // 2, 0, T)).astype(np.int32) for _ in range(2))
    blind[:, T // 4:T // 2], unseen[:, T // 4:T // 2], blind[-1], unseen[-1] = -1, -2, -1, -2
    yield Case("rows that see nothing", blind, unseen, CAUSAL)
    yield Case("nothing in common", 5 * ones(T), 3 * ones(S), WHOLE)


def visible(case: Case) -> np.ndarray:
    """Return bool [B, T, S]: which keys each query sees."""
    seen = case.q_segments[:, :, None] == case.k_segments[:, None, :]
    within = case.mask.sees(np.arange(seen.shape[1])[:, None], np.arange(seen.shape[2]))
    return seen if within is None else seen & within


@jax.jit
def plain_forward(q, k, v, seen_BTS):
    """Return (o, lse) of whole scores; zeros and MASKED for queries that see nothing."""
    G = q.shape[2] // k.shape[2]
    s_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q, jnp.repeat(k, G, 2)) * q.shape[3] ** -0.5
    s_BNTS = jnp.where(seen_BTS[:, None], s_BNTS, -jnp.inf)
    some_B1T1 = seen_BTS.any(2)[:, None, :, None]
    top = jnp.where(some_B1T1, s_BNTS.max(-1, keepdims=True), 0.0)
    p_BNTS = jnp.exp(s_BNTS - top)
    total = jnp.where(some_B1T1, p_BNTS.sum(-1, keepdims=True), 1.0)
    lse = jnp.where(some_B1T1, top + jnp.log(total), MASKED)
    return jnp.einsum("BNTS,BSNH->BTNH", p_BNTS / total, jnp.repeat(v, G, 2)), lse[..., 0].swapaxes(1, 2)


@jax.jit
def plain_backward(q, k, v, seen_BTS, o, lse_BTN, do):
    """Return dq, dk and dv of these pairs for a given o and lse."""
    (B, S, K, H), G = k.shape, q.shape[2] // k.shape[2]

    def expand(x: jax.Array) -> jax.Array:
        return jnp.repeat(x, G, 2)
    s_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q, expand(k)) * H ** -0.5
    p_BNTS = jnp.exp(jnp.where(seen_BTS[:, None], s_BNTS - lse_BTN.swapaxes(1, 2)[..., None], -jnp.inf))
    delta_BNT1 = (do * o).sum(-1).swapaxes(1, 2)[..., None]
    ds_BNTS = p_BNTS * (jnp.einsum("BTNH,BSNH->BNTS", do, expand(v)) - delta_BNT1) * H ** -0.5

    def reduce(x: jax.Array) -> jax.Array:
        return x.reshape(B, S, K, G, -1).sum(3)
    return (jnp.einsum("BNTS,BSNH->BTNH", ds_BNTS, expand(k)), reduce(jnp.einsum("BNTS,BTNH->BSNH", ds_BNTS, q)),
            reduce(jnp.einsum("BNTS,BTNH->BSNH", p_BNTS, do)))


def check(functions: Callable, case: Case, widths: tuple[int, int], sizes: Sizes, device, cpu) -> dict[str, float]:
    """Return the engine's errors as shares of the largest number of each result. An error is inf if rows that see
    nothing are not zeros and MASKED.

    functions: for a mask, the engine's jitted forward and backward. The backward gets o and lse as if the queries also
    saw other keys on another device.
    """
    rng, (H, V) = np.random.default_rng(widths[0]), widths
    B, T, S = *case.q_segments.shape, case.k_segments.shape[1]

    def exact(x: np.ndarray) -> np.ndarray:      # round to numbers of the dtype
        return np.asarray(jnp.asarray(x, DTYPE), np.float32)

    def draw(*shape: int) -> np.ndarray:
        return exact(rng.standard_normal((B, *shape), np.float32))
    seen = visible(case)
    with jax.default_device(cpu), jax.default_matmul_precision("highest"):
        q, k, v, do = (draw(*shape) for shape in (
            (T, sizes.heads, H), (S, sizes.kv_heads, H), (S, sizes.kv_heads, V), (T, sizes.heads, V)))
        o, lse = map(np.asarray, plain_forward(q, k, v, seen))
        elsewhere = rng.standard_normal(lse.shape, np.float32)
        together = np.logaddexp(lse, elsewhere)
        outside = rng.standard_normal(o.shape, np.float32) * np.exp(elsewhere - together)[..., None]
        whole = exact(o * np.exp(lse - together)[..., None] + outside)
        grads = plain_backward(q, k, v, seen, whole, together, do)

    def on_device(dtype, *arrays: np.ndarray) -> list[jax.Array]:
        return [jax.device_put(np.asarray(x, dtype), device) for x in arrays]
    given = [*on_device(DTYPE, q, k, v), *on_device(np.int32, case.q_segments, case.k_segments)]
    forward, backward = functions(case.mask)
    got_o, got_lse = jax.device_get(forward(*given))
    rest = *on_device(DTYPE, whole), *on_device(np.float32, together), *on_device(DTYPE, do)
    got = jax.device_get(backward(*given, *rest))
    nothing = ~seen.any(2)
    errors = {name: float(np.abs(np.float32(a) - b).max() / max(SMALLEST, np.abs(b).max())) for name, a, b in zip(
        ("o", "lse", "dq", "dk", "dv"), (got_o, np.where(nothing[..., None], 0, got_lse), *got),
        (o, np.where(nothing[..., None], 0, lse), *map(np.asarray, grads)))}
    if nothing.any():
        zeros = not got_o[nothing].any() and (got_lse[nothing] <= MASKED / 2).all()
        errors["rows that see nothing"] = 0.0 if zeros else math.inf
    return errors


def has_mosaic(gpu: hardware.Gpu | None) -> bool:
    """Return whether the Mosaic kernels run on this GPU."""
    return bool(gpu and gpu.chip and gpu.chip.compute_capability == mosaic.COMPUTE_CAPABILITY)


def engines(widths: tuple[int, int], gpu: str, sizes: Sizes, interpret: bool) -> dict[str, Callable[[], Engine]]:
    """Return engines by name, the most likely choice of a run first. Each is made when its function is called."""
    chosen = sizes.tiles or tiles.of(widths[0], gpu, value_dim=widths[1])
    made = {}
    if chosen:
        made["pallas"] = partial(pallas.engine, chosen, full=1, interpret=interpret)        # as in a run of any size
        if widths == sizes.widths[0]:
            made["pallas, heads summed outside"] = partial(pallas.engine, chosen, full=10**9, interpret=interpret)
    if has_mosaic(hardware.GPUS.get(gpu)) and mosaic.widths_of(*widths) and not interpret:
        made["mosaic"] = mosaic.engine
    if not interpret and widths[0] <= 128 and cudnn.engine():
        made["cudnn"] = cudnn.engine
    return made | {"blockwise": partial(blockwise.engine, sizes.block)}


def measured(make: Callable[[], Engine], widths: tuple[int, int], with_documents: bool, sizes: Sizes, device, cpu) -> dict:
    """Return what Item.measure returns. A case that raises is recorded, and the others continue."""
    compared, errors, engine = {}, {}, make()

    def jit(mask: Mask) -> list[Callable]:
        return [jax.jit(partial(way, mask=mask)) for way in (engine.forward, engine.backward)]
    functions = functools.cache(jit)
    for case in cases(sizes, with_documents):
        try:
            for what, error in check(functions, case, widths, sizes, device, cpu).items():
                compared[f"{case.name}: {what}"] = (error, TOLERANCE)
        except Exception as error:
            errors[case.name] = f"{type(error).__name__}: {error}"
    return {"compared": compared} | ({"errors": errors} if errors else {})


def items(devices, cpu, sizes: Sizes = Sizes()) -> list[Item]:
    """Return the items, first those of engines that a run of Llama's shape chooses first."""
    device = devices[0]
    gpu = hardware.from_device_kind(device.device_kind)
    out = []
    for widths in sizes.widths:
        of = f"head_dim {widths[0]}" + (f", values of {widths[1]}" if widths[1] != widths[0] else "")
        for name, make in engines(widths, gpu.name if gpu else "", sizes, device.platform == "cpu").items():
            measure = partial(measured, make, widths, name != "cudnn", sizes, device, cpu)
            out.append(Item(f"attention/{name}, {of}", measure, 12))
    return out
