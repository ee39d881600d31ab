"""Time blocks of the grouped matmuls on this machine's GPU: a table for each shape of experts, a row for each kernel.
"""
from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import tiles as tile_timing
from meshtrain.kernels import grouped, tiles
from meshtrain.kernels.tiles import GroupedBlock

BLOCK_ROWS = tiles.GROUPED[2].rows


class Shape(NamedTuple):
    """tokens: those of a microbatch on one device. Each token chooses `chosen` of the experts."""
    name: str
    tokens: int
    experts: int
    chosen: int
    embed: int
    mlp: int


SHAPES = (Shape("Qwen3 30B-A3B", 16384, 128, 8, 2048, 768), Shape("Mixtral 8x7B", 8192, 8, 2, 4096, 14336))


class Kernel(NamedTuple):
    """call(engine) -> arrays. flops: of one call, without padding."""
    kind: str
    call: Callable
    args: tuple
    flops: float


# (rows, columns): (step, warps, stages), …
ROWS = {(128, 256): ((64, 8, 3), (64, 8, 4), (32, 8, 6), (128, 8, 2)),
        (128, 128): ((64, 8, 3), (64, 8, 4), (64, 8, 6), (64, 4, 3), (64, 4, 4), (128, 8, 3), (32, 8, 6)),
        (128, 64): ((64, 4, 4), (128, 4, 3))}
# Rows that are gathered by number need two dependent loads, so one stage fewer is in flight. So steps are larger, or
# there are more stages.
CANDIDATES = {
    "deep": ROWS, "small": ROWS,
    "beside": {(128, 64): ((64, 8, 3), (64, 8, 5), (64, 8, 7), (128, 8, 3), (128, 8, 4), (64, 4, 5)),
               (128, 128): ((64, 8, 3), (64, 8, 4), (64, 8, 6)), (128, 32): ((64, 4, 4), (128, 4, 4))},
    "outer": {(128, 256): ((32, 8, 3), (32, 8, 5), (32, 8, 6), (32, 8, 7), (64, 8, 3), (64, 8, 4), (128, 8, 2)),
              (128, 128): ((64, 4, 3), (64, 4, 4), (64, 8, 4), (64, 8, 6), (128, 8, 3), (32, 4, 5), (32, 4, 7)),
              (256, 128): ((32, 8, 6), (64, 8, 3), (64, 8, 4))}}


def candidates(kind: str) -> list[GroupedBlock]:
    """Return the blocks to time for this kind of kernel, first the one in use."""
    used = getattr(tiles.GROUPED[2], kind)
    every = [GroupedBlock(*size, *rest) for size, more in CANDIDATES[kind].items() for rest in more]
    return [used, *(block for block in every if block != used)]


def draw(shape: Shape) -> dict:
    """Return inputs for the kernels of a layer's experts: tokens that choose experts at random, in bfloat16."""
    rng, (_, A, E, K, D, F) = np.random.default_rng(0), shape
    chosen = np.argsort(rng.random((A, E)), 1)[:, :K]
    expert, token = chosen.ravel(), np.repeat(np.arange(A), K)
    sizes = np.bincount(expert, minlength=E)
    count = int(sum(-(-sizes // BLOCK_ROWS)))
    groups = jax.jit(lambda sizes: grouped.groups_of(sizes, count, BLOCK_ROWS))(jnp.asarray(sizes, jnp.int32))
    number = np.full(count * BLOCK_ROWS, -1, np.int32)
    first, order = np.asarray(groups.first), np.argsort(expert, kind="stable")
    for e, rows in enumerate(np.split(token[order], np.cumsum(sizes)[:-1])):
        number[first[e] * BLOCK_ROWS:][:len(rows)] = rows
    keys = iter(jax.random.split(jax.random.key(0), 9))

    def normal(*dims: int) -> jax.Array:
        return jax.random.normal(next(keys), dims, jnp.bfloat16)
    R = len(number)
    return dict(groups=groups, number=jnp.asarray(number), x=normal(A, D), dy=normal(A, D), gate=normal(R, F),
                up=normal(R, F), into=normal(E, D, F), back=normal(E, F, D), share=jnp.ones((R, 1), jnp.float32))


def kernels(shape: Shape, given: dict) -> dict[str, Kernel]:
    """Return the kernels of a layer's forward and backward (`parallel.experts.dispatch`), including the product that
    computes SwiGLU's gradients in the same kernel."""
    of, one = grouped.GroupedOperands, 2.0 * shape.tokens * shape.chosen * shape.embed * shape.mlp

    def swiglu(gate, up):
        return jax.nn.silu(gate) * up

    def weight(up, gate):
        return (swiglu(gate.astype(jnp.float32), up),)

    def gradients(dhw, share, gate, up):
        h, back = jax.vjp(swiglu, gate.astype(jnp.float32), up.astype(jnp.float32))
        return h * share, (dhw * h).sum(1), *back(dhw * share)

    def kernel(kind, products, call, *names):
        return Kernel(kind, call, tuple(given[name] for name in ("groups", *names)), products * one)

    def take(engine, x, number):
        return engine.take(x, number)
    return {
        "x · gate": kernel("deep", 1, lambda e, g, x, n, w: e.rows([of(take(e, x, n), w, "gkn")], g),
                           "x", "number", "into"),
        "x · up, SwiGLU": kernel("small", 1, lambda e, g, x, n, w, gate: e.rows(
            [of(take(e, x, n), w, "gkn")], g, weight, [gate]), "x", "number", "into", "gate"),
        "h · down": kernel("small", 1, lambda e, g, h, w: e.rows([of(h, w, "gkn")], g), "gate", "back"),
        "dy · down, SwiGLU backward": kernel("beside", 1, lambda e, g, dy, n, w, s, gate, up: e.rows(
            [of(take(e, dy, n), w, "gnk")], g, gradients, [s, gate, up]),
            "dy", "number", "back", "share", "gate", "up"),
        "dy · down alone": kernel("deep", 1, lambda e, g, dy, n, w: e.rows([of(take(e, dy, n), w, "gnk")], g),
                                  "dy", "number", "back"),
        "dx": kernel("small", 2, lambda e, g, a, b, w: e.rows([of(a, w, "gnk"), of(b, w, "gnk")], g),
                     "gate", "up", "into"),
        "gradient of gate": kernel("outer", 1, lambda e, g, x, n, d: e.outer(take(e, x, n), d, g, "gkn"),
                                   "x", "number", "gate"),
        "gradient of down": kernel("outer", 1, lambda e, g, dy, n, h: e.outer(take(e, dy, n), h, g, "gnk"),
                                   "dy", "number", "gate"),
    }


def engine(kind: str, block: GroupedBlock, interpret: bool = False) -> grouped.GroupedEngine:
    """Return an engine that uses this block for every kernel of its kind."""
    used = tiles.GROUPED[2]
    kinds = ("outer",) if kind == "outer" else ("deep", "small", "beside")
    return grouped.kernels({2: used._replace(**dict.fromkeys(kinds, block))}, interpret)


def timed(shape: Shape, threads: int, until: float, take_turn: Callable) -> dict[str, tuple[
        Kernel, list[tuple[float, GroupedBlock]]]]:
    """Return {name: (kernel, [(seconds, block)], the fastest first)}. Several threads compile, and then each is timed
    alone after take_turn(). Blocks that do not compile, or whose results differ from those of the block in use, are
    left out."""
    given = draw(shape)
    every = kernels(shape, given)
    jobs = [(name, block) for name, kernel in every.items() for block in candidates(kernel.kind)]

    def compiled(job):
        name, block = job
        kernel = every[name]
        try:
            made = engine(kernel.kind, block)
            return jax.jit(lambda *args: kernel.call(made, *args)).lower(*kernel.args).compile()
        except Exception as error:
            print(f"{shape.name}, {name}, {tuple(block)}: {str(error).splitlines()[0][:120]}", flush=True)
    with ThreadPoolExecutor(threads) as pool:
        programs = list(pool.map(compiled, jobs))
    found, expected = {name: [] for name in every}, {}
    take_turn()
    for (name, block), program in zip(jobs, programs):
        if program is None or time.time() > until:
            continue
        made = [float(jnp.abs(a.astype(jnp.float32)).mean()) for a in jax.tree.leaves(program(*every[name].args))]
        if np.allclose(made, expected.setdefault(name, made), rtol=1e-3):
            found[name].append((tile_timing.seconds(program, every[name].args, 3, 5), block))
        else:
            print(f"{shape.name}, {name}, {tuple(block)}: other numbers", flush=True)
    return {name: (every[name], sorted(times)) for name, times in found.items()}
