"""Compare grouped matmuls, recurrences, float8 matmuls and decode attention on a device with float32 on the CPU."""
from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_attention import documents
from benchmarks.gpu_record import Item
from meshtrain import hardware
from meshtrain.kernels import decode, grouped, mosaic, mosaic_mlp, recurrence, recurrence_pallas
from meshtrain.kernels.activations import ACTIVATIONS, SLOPES
from meshtrain.kernels.engine import Scores
from meshtrain.model import float8

# Share of the largest number of a result. bfloat16: operands are exact, sums are float32, and results are rounded to
# 2^-9 of each number; recurrences also round operands between their products. float32: sums of some hundred products in
# another order.
TOLERANCE = {"bfloat16": 1e-2, "float32": 1e-5}


class Sizes(NamedTuple):
    """groups: rows of each. The widths are not multiples of a tile of 256."""
    groups: tuple[int, ...] = (300, 0, 1, 128, 700, 77)
    contracted: int = 320
    columns: int = 448
    rows: int = 2
    tokens: int = 1000
    heads: int = 8
    width: int = 128


def errors(found, expected) -> list[float]:
    """Return the largest difference of each array as a share of its largest number."""
    return [float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max() / np.abs(b).max())
            for a, b in zip(found, expected, strict=True)]


# ---- grouped matmuls -------------------------------------------------------------------------------------------------


def products(engine: grouped.GroupedEngine, dims: str, x, w, y, number, groups, used, share):
    """Compute rows of x times matrices, without and with an epilogue over `share` and y; rows of y times the transposed
    matrices; and outer products. Unused rows become zero."""
    taken, turned = engine.take(x, number), dims.translate(str.maketrans("kn", "nk"))
    ordered = grouped.GroupedOperands(jnp.where(used[:, None], x[jnp.maximum(number, 0)], 0), w, dims)
    of = [grouped.GroupedOperands(taken, w, dims)]

    def scale(product, share, beside):
        return product * share, (product * beside).sum(1)
    z, = engine.rows(of, groups)
    in_order, = engine.rows([ordered], groups)
    times, sums = engine.rows(of, groups, scale, [share, y])
    back, = engine.rows([grouped.GroupedOperands(y, w, turned), grouped.GroupedOperands(y, w, turned)], groups)
    outer = engine.outer(taken, y, groups, dims)

    def keep(a: jax.Array) -> jax.Array:
        return jnp.where(used.reshape(-1, *[1] * (a.ndim - 1)), a, 0)
    return *map(keep, (z, in_order, times, sums, back)), outer


def compare_grouped(engine: grouped.GroupedEngine, dims: str, dtype: str, sizes: Sizes, device, cpu) -> dict:
    """Return Item's results. Half of the rows are taken twice, and one block is unused."""
    rng, block = np.random.default_rng(0), engine.block(0, 0)
    count = sum(-(-size // block) for size in sizes.groups) + 1
    with jax.default_device(cpu):
        groups = jax.tree.map(np.asarray, grouped.groups_of(jnp.array(sizes.groups, jnp.int32), count, block))
    used = np.zeros(count * block, bool)
    for first, size in zip(groups.first, sizes.groups):
        used[first * block:][:size] = True
    (A, K, N), G = (sum(sizes.groups) // 2, sizes.contracted, sizes.columns), len(sizes.groups)
    number = np.where(used, np.cumsum(used) % A, -1).astype(np.int32)

    def exact(*shape: int) -> np.ndarray:
        return np.asarray(jnp.asarray(rng.standard_normal(shape), dtype), np.float32)
    x, w, y, share = exact(A, K), exact(G, K, N), exact(count * block, N) * used[:, None], exact(count * block, 1)
    w = w.transpose(["gkn".index(letter) for letter in dims])
    rest = number, groups, used, share
    given = [jax.device_put(np.asarray(a, dtype), device) for a in (x, w, y)]
    found = jax.jit(partial(products, engine, dims))(*given, *jax.device_put(rest, device))
    with jax.default_device(cpu), jax.default_matmul_precision("highest"):
        expected = jax.jit(partial(products, grouped.loop(), dims))(x, w, y, *rest)
    of = "rows", "rows in order", "rows times a number", "sums of rows", "rows backward", "outer products"
    return {"compared": {name: (error, TOLERANCE[dtype]) for name, error in zip(of, errors(found, expected))}}


# ---- recurrences -----------------------------------------------------------------------------------------------------

KINDS = {"G, gated delta rule": (True, False), "K, Kimi delta attention": (True, True), "M, Mamba-2": (False, False)}


def both_ways(recur, inputs, segments, do):
    """Return (o, gradients of the inputs)."""
    o, back = jax.vjp(lambda *inputs: recur(*inputs, segments).o_BTNV, *inputs)
    return [o, *(a for a in back(do.astype(o.dtype)) if a is not None)]


def compare_recurrence(recur, delta: bool, by_channel: bool, sizes: Sizes, device, cpu) -> dict:
    """Return Item's results."""
    rng, (B, T, N, H) = np.random.default_rng(0), (sizes.rows, sizes.tokens, sizes.heads, sizes.width)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    def exact(a: np.ndarray) -> np.ndarray:
        return np.asarray(jnp.asarray(a, jnp.bfloat16), np.float32)

    def unit(a: np.ndarray) -> np.ndarray:
        return a / np.sqrt((a * a).sum(-1, keepdims=True))
    K = N if by_channel else N // 2
    q, k, v, do = normal(B, T, K, H), normal(B, T, K, H), normal(B, T, N, H), normal(B, T, N, H)
    q, k = unit(q) * H ** -0.5, unit(k)
    g = -.3 * np.exp(normal(B, T, N, *[H] * by_channel))
    beta = 1 / (1 + np.exp(-normal(B, T, N))) if delta else None
    segments = documents(rng, B, T, T / 5)
    q, k, v, do = map(exact, (q, k, v, do))
    narrow = [jax.device_put(np.asarray(a, jnp.bfloat16), device) for a in (q, k, v, do)]
    inputs = *narrow[:3], *jax.device_put((g, beta), device)
    found = jax.jit(partial(both_ways, recur))(inputs, jax.device_put(segments, device), narrow[3])
    with jax.default_device(cpu), jax.default_matmul_precision("highest"):
        expected = jax.jit(partial(both_ways, recurrence.recurrence))((q, k, v, g, beta), segments, do)
    of = "o", "dq", "dk", "dv", "dg", "dbeta"
    return {"compared": {name: (error, TOLERANCE["bfloat16"]) for name, error in zip(of, errors(found, expected))}}


# ---- float8 ----------------------------------------------------------------------------------------------------------

# Share of the largest number of a result. cuBLAS adds 128 products with about 14 bits, and then adds these sums in
# float32.
FLOAT8_TOLERANCE = 2e-3


def compare_float8(sizes: Sizes, device) -> dict:
    """Return Item's results for products of operands that are already float8, as in `model.float8`."""
    rng, (M, K, N) = np.random.default_rng(0), (sizes.tokens // 8 * 8, 4096, sizes.columns)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)
    a, b, d = normal(M, K), normal(K, N), normal(M, N)
    e4m3, e5m2 = float8.E4M3, float8.E5M2

    def exact(x, dtype) -> np.ndarray:
        return np.asarray(jnp.asarray(x, dtype), np.float64)
    dot = jax.jit(partial(jnp.einsum, precision=float8.precision(device.platform), preferred_element_type=jnp.float32),
                  static_argnums=0)
    compared = {}
    for name, eq, (x, y), (of_x, of_y) in (("forward", "mk,kn->mn", (a, b), (e4m3, e4m3)),
                                           ("dx", "mn,kn->mk", (d, b), (e5m2, e4m3)),
                                           ("dw", "mk,mn->kn", (a, d), (e4m3, e5m2))):
        expected = np.einsum(eq, exact(x, of_x), exact(y, of_y), optimize=True)
        found = dot(eq, *jax.device_put((jnp.asarray(x, of_x), jnp.asarray(y, of_y)), device))
        compared[name] = errors([found], [expected])[0], FLOAT8_TOLERANCE
    return {"compared": compared}


# ---- MLPs ------------------------------------------------------------------------------------------------------------


def compare_mlp(activation: str, programs: int, sizes: Sizes, device) -> dict:
    """Return Item's results: `kernels.mosaic_mlp` against float64. The reference uses the kernels' rounded gate and
    up."""
    rng, (R, K, F) = np.random.default_rng(0), (sizes.tokens // 128 * 128, 4096, 1024)

    def draw(scale: float, *shape: int) -> jax.Array:
        return jnp.asarray(scale * rng.standard_normal(shape, np.float32), jnp.bfloat16)
    x, dy, (gate, up, down_t) = draw(1, R, K), draw(1, R, K), (draw(K ** -.5, K, F) for _ in range(3))

    def exact(a: np.ndarray) -> np.ndarray:
        return np.asarray(a, np.float64)
    forward = jax.jit(partial(mosaic_mlp.forward, activation=activation, programs=programs))
    made = forward(*jax.device_put((x, gate, up), device))
    backward = jax.jit(partial(mosaic_mlp.backward, activation=activation, programs=programs))
    grads = backward(*jax.device_put((dy, down_t), device), *made[:2])
    kept = [jnp.asarray(np.asarray(y), jnp.float32) for y in made[:2]]
    h, vjp = jax.vjp(ACTIVATIONS[activation], *kept)
    expected = exact(x) @ exact(gate), exact(x) @ exact(up), h, *vjp(jnp.asarray(exact(dy) @ exact(down_t), jnp.float32)), h
    names = "gate", "up", "activation", "gate's gradient", "up's gradient", "activation again"
    return {"compared": {name: (error, TOLERANCE["bfloat16"])
                         for name, error in zip(names, errors((*made, *grads), expected), strict=True)}}


# ---- the KV cache ----------------------------------------------------------------------------------------------------


def compare_decode(dtype: str, slots: int, sizes: Sizes, device, cpu) -> dict:
    """Return Item's results for a layer with a window and sinks and for one without, with slots of random lengths. The
    caches must be bitwise equal."""
    rng, (N, K, H, R) = np.random.default_rng(0), (sizes.heads, 2, sizes.width, 512)

    def normal(*shape: int) -> np.ndarray:
        return np.asarray(jnp.asarray(rng.standard_normal(shape, np.float32), dtype))
    given = (decode.Token(normal(slots, N, H), normal(slots, K, H), normal(slots, K, H)),
             (normal(2, slots, K, R, H), normal(2, slots, K, R, H)), rng.integers(-1, R, slots, np.int32))
    compared = {}
    for name, more in (("all places", {}), ("a window", dict(window=200, sinks_N=np.ones(N, np.float32)))):
        def call(token, cache, at_S, interpret=False, more=more):
            return decode.attend(token, cache, 1, at_S, Scores(softcap=30.0), **more, interpret=interpret)
        found = jax.jit(call, donate_argnums=1)(*jax.device_put(given, device))
        with jax.default_device(cpu):
            expected = jax.jit(partial(call, interpret=True))(*jax.tree.map(
                lambda x: np.float32(x) if x.dtype != np.int32 else x, given))

        def flatten(result: tuple) -> tuple:
            return (result[0], *result[1])
        compared |= {f"{what}, {name}": (error, tolerance) for what, error, tolerance in zip(
            ("o", "keys", "values"), errors(flatten(found), flatten(expected)), (TOLERANCE[dtype], 0.0, 0.0),
            strict=True)}
    return {"compared": compared}


def items(devices, cpu, sizes: Sizes = Sizes()) -> list[Item]:
    device = devices[0]
    if device.platform == "cpu":
        return []
    kernels = grouped.kernels()
    out = [Item(f"kernel/grouped matmuls, matrices as {dims}, {dtype}",
                partial(compare_grouped, kernels, dims, dtype, sizes, device, cpu), 15)
           for dtype in TOLERANCE for dims in ("gkn", "kgn")]
    out += [Item(f"kernel/KV cache, {slots} slots, {dtype}", partial(compare_decode, dtype, slots, sizes, device, cpu), 10)
            for dtype in TOLERANCE for slots in (3, 200)]
    gpu = hardware.from_device_kind(device.device_kind)
    if mosaic.runs_on(gpu):
        whole = sizes._replace(contracted=384, columns=512)         # fills tiles of 192 and of 256
        by_mosaic = grouped.kernels(programs=gpu.num_sms)
        out += [Item(f"kernel/grouped matmuls with Mosaic, matrices as {dims}, bfloat16",
                     partial(compare_grouped, by_mosaic, dims, "bfloat16", whole, device, cpu), 15)
                for dims in ("gkn", "kgn")]
        out += [Item(f"kernel/MLP with Mosaic, {activation}",
                     partial(compare_mlp, activation, gpu.num_sms, sizes, device), 10) for activation in SLOPES]
    if not hardware.lacks_float8(gpu):
        out.append(Item("kernel/float8 matmuls", partial(compare_float8, sizes, device), 10))
    if gpu and gpu.chip and gpu.chip.compute_capability in recurrence_pallas.COMPILED:
        recur = recurrence_pallas.engine()
        out += [Item(f"kernel/recurrence {kind}", partial(compare_recurrence, recur, *of, sizes, device, cpu), 20)
                for kind, of in KINDS.items()]
    return out
