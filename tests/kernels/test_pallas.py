"""The Pallas kernels: their numbers, step by step on the CPU, against scores held whole in float64; which blocks they
visit; and what the GPU's compiler makes of them: registers that spill, shared memory. No GPU is needed; none has run
them here.
"""
import functools
import re
import subprocess
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sampling
from jax.sharding import PartitionSpec as P

from meshtrain import hardware
from meshtrain.cost.program import compile
from meshtrain.kernels import pallas, tiles
from meshtrain.kernels.engine import CAUSAL, MASKED, WHOLE, Mask, Scores
from meshtrain.kernels.tiles import Blocks, Tiles
from meshtrain.sharding.mesh import MeshSpec

slow = partial(pytest.param, marks=sampling.GRID)


# ---- segments of queries and keys ------------------------------------------------------------------------------------


def documents(rng, B: int, length: int, mean: float, edges=()) -> np.ndarray:
    """int32 [B, length]: documents numbered from 1, of `mean` tokens, that end at `edges` as well."""
    starts = rng.random((B, length)) < 1 / mean
    starts[:, [edge for edge in edges if edge < length]] = True
    return (1 + np.cumsum(starts, 1)).astype(np.int32)


def pair(row: np.ndarray, T: int, S: int, causal: bool):
    """Queries and keys of one row: the same tokens, or the last T and the S before them."""
    return (row[:, :T], row[:, :T]) if causal else (row[:, S:S + T], row[:, :S])


def drawn_segments(kind: str, rng, B: int, T: int, S: int, causal: bool):
    if kind == "no order":
        q = rng.integers(0, 4, (B, T)).astype(np.int32)
        return q, q if causal else rng.integers(0, 4, (B, S)).astype(np.int32)
    if kind == "nothing in common" and not causal:
        return np.full((B, T), 5, np.int32), np.full((B, S), 3, np.int32)
    q, k = pair(documents(rng, B, T + S, *{
        "one document": (1e9,), "nothing in common": (1,), "short documents": (4,), "documents of half a row": (S / 2,),
        "padding": (S / 3,),
        "rows that see nothing": (S / 3,),
        "borders on block edges": (1e9, (15, 16, 17, 31, 32, 33, 48, 64, 80, 96))}[kind]), T, S, causal)
    q, k = q.copy(), k.copy()
    if kind == "padding":           # the end of a row is no document; its tokens see each other
        q[:, -T // 3 + 3:] = k[:, -S // 3 + 3:] = 0
    if kind == "rows that see nothing":
        q[:, T // 4:T // 2], k[:, S // 4:S // 2] = -1, -2
        q[-1], k[-1] = -1, -2
    return q, k


KINDS = ("one document", "short documents", "documents of half a row", "borders on block edges",
         "padding", "rows that see nothing",
         "nothing in common", "no order")


def seen_pairs(q_segments, k_segments, mask: Mask) -> np.ndarray:
    """bool [B, T, S]."""
    seen = q_segments[:, :, None] == k_segments[:, None, :]
    T, S = seen.shape[1:]
    apart = mask.ahead + np.arange(T)[:, None] - np.arange(S)
    return seen & ((apart >= 0) | (not mask.causal)) & (apart < (mask.window or T + S + mask.ahead))


# ---- numbers ---------------------------------------------------------------------------------------------------------


def capped(s, softcap: float):
    return softcap * np.tanh(s / softcap) if softcap else s


def plain_forward(q, k, v, seen, softcap):
    """o and lse in float64."""
    G = q.shape[2] // k.shape[2]
    s = np.where(seen[:, None], capped(np.einsum("btnh,bsnh->bnts", q, np.repeat(k, G, 2)) * q.shape[3] ** -0.5,
                                       softcap), -np.inf)
    some = seen.any(2)[:, None, :, None]
    p = np.exp(s - np.where(some, s.max(-1, keepdims=True), 0))
    total = np.where(some, p.sum(-1, keepdims=True), 1)
    lse = np.where(some, np.where(some, s.max(-1, keepdims=True), 0) + np.log(total), MASKED)
    return np.einsum("bnts,bsnh->btnh", p / total, np.repeat(v, G, 2)), lse[..., 0].swapaxes(1, 2)


def plain_backward(q, k, v, seen, o, lse, do, softcap):
    """dq, dk, dv of these pairs in float64, o and lse given."""
    (B, S, K, H), G = k.shape, q.shape[2] // k.shape[2]
    many = lambda x: np.repeat(x, G, 2)
    s = capped(np.einsum("btnh,bsnh->bnts", q, many(k)) * H ** -0.5, softcap)
    p = np.exp(np.where(seen[:, None], s - lse.swapaxes(1, 2)[..., None], -np.inf))
    ds = p * (np.einsum("btnh,bsnh->bnts", do, many(v)) - (do * o).sum(-1).swapaxes(1, 2)[..., None]) * H ** -0.5
    ds = ds * (1 - (s / softcap) ** 2) if softcap else ds
    once = lambda x: x.reshape(B, S, K, G, -1).sum(3)
    return (np.einsum("bnts,bsnh->btnh", ds, many(k)), once(np.einsum("bnts,btnh->bsnh", ds, q)),
            once(np.einsum("bnts,btnh->bsnh", p, do)))


SQUARE, FLAT, TALL = (Tiles(*[Blocks(rows, columns, 4, 2)] * 3) for rows, columns in ((16, 16), (16, 32), (32, 16)))
near = lambda window: CAUSAL._replace(window=window)
edge = lambda window, ahead: Mask(False, window, ahead)
# T, S, N, K, H, mask, tiles, programs that fill the GPU (1: the heads of a group are summed inside dkv), softcap; for
# values of another width H is (width of keys, of values)
CELLS = {
    "causal, heads summed inside": (70, 70, 4, 2, 16, CAUSAL, TALL, 1, 0),
    "keys before queries, one kv head, S > T": (40, 72, 2, 1, 24, WHOLE, FLAT, 10**6, 0),
    "a window, a softcap": (70, 70, 2, 1, 16, near(21), TALL, 1, 0.7),
    "values narrower than keys": (50, 50, 4, 2, (40, 20), CAUSAL, TALL, 1, 0),
    "values wider than keys, summed outside": (40, 72, 2, 1, (16, 40), WHOLE, FLAT, 10**6, 0),
}
SLOW = {
    "S < T, no group": (90, 33, 2, 2, 16, WHOLE, TALL, 1, 0),
    "causal, heads summed outside": (64, 64, 6, 2, 16, CAUSAL, SQUARE, 10**6, 0),
    "causal, a head of 80": (50, 50, 2, 1, 80, CAUSAL, FLAT, 1, 0),
    "eight heads of one": (48, 48, 8, 1, 32, CAUSAL, TALL, 1, 0),
    "the tiles of H100": (256, 256, 2, 1, 128, CAUSAL, tiles.of(128, "h100"), 1, 0),
    "the tiles of heads of 256": (96, 128, 2, 2, 256, WHOLE, tiles.of(256, "b200"), 1, 0),
    "the tiles of latents": (96, 128, 2, 2, (192, 128), WHOLE, tiles.of(192, "h100", value_dim=128), 1, 0),
    "a window of one token": (50, 50, 2, 1, 16, near(1), FLAT, 1, 0),
    "a window of a block": (64, 64, 4, 2, 16, near(16), SQUARE, 10**6, 0),
    "a chunk at the window's edge": (48, 48, 2, 1, 16, edge(70, 48), SQUARE, 1, 0.7),
    "a chunk beyond the window": (33, 48, 2, 1, 16, edge(20, 80), TALL, 1, 0),
    "a window within the tiles of H100": (256, 256, 2, 1, 128, near(100), tiles.of(128, "h100"), 1, 30.0),
}
# Of the largest number of a result. float32: sums of up to 128 products of 256 in another order. bfloat16: o, p and ds
# are rounded to 8 bits before they are summed.
TOLERANCE = {"float32": 5e-6, "bfloat16": 2e-2}


@functools.cache
def both_ways(mask: Mask, tiles: Tiles, full: int, softcap: float):
    """Jitted (q, k, v, q segments, k segments, o, lse, do) -> forward and backward of the engine, the backward with o
    and lse as given."""
    engine = pallas.engine(tiles, Scores(softcap=softcap), full=full, interpret=True)
    return jax.jit(lambda *args: (engine.forward(*args[:5], mask), engine.backward(*args, mask)))


def check(cell, kind: str, dtype: str, seed: int):
    """The backward is given o and lse as if the queries saw other keys as well, elsewhere."""
    T, S, N, K, H, mask, tiles, full, softcap = cell
    (H, V), rng, B = H if isinstance(H, tuple) else (H, H), np.random.default_rng(seed), 2
    exact = lambda x: np.asarray(jnp.asarray(x, dtype), np.float64)     # numbers that the dtype has
    q, k, v, do = (exact(rng.standard_normal((B, length, heads, width)))
                   for length, heads, width in ((T, N, H), (S, K, H), (S, K, V), (T, N, V)))
    segments = drawn_segments(kind, rng, B, T, S, mask.causal)
    seen = seen_pairs(*segments, mask)
    o, lse = plain_forward(q, k, v, seen, softcap)
    elsewhere = rng.standard_normal(lse.shape)
    together = np.logaddexp(lse, elsewhere)
    whole = exact(o * np.exp(lse - together)[..., None] + rng.standard_normal(o.shape) * np.exp(elsewhere - together)[
        ..., None])
    given = [jnp.asarray(x, dtype) for x in (q, k, v)] + [jnp.asarray(x) for x in segments]
    (got_o, got_lse), grads = both_ways(mask, tiles, full, softcap)(
        *given, jnp.asarray(whole, dtype), jnp.asarray(together, jnp.float32), jnp.asarray(do, dtype))
    nothing = ~seen.any(2)
    assert not np.asarray(got_o)[nothing].any() and (np.asarray(got_lse)[nothing] == np.float32(MASKED)).all()
    expected = (o, np.where(nothing[..., None], 0, lse), *plain_backward(q, k, v, seen, whole, together, do, softcap))
    got = (got_o, np.where(nothing[..., None], 0, got_lse), *grads)
    for name, a, b in zip(("o", "lse", "dq", "dk", "dv"), got, expected):
        assert np.asarray(a).dtype in (np.float32, np.float64), name
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE[dtype] * max(1.0, np.abs(b).max()),
                                   err_msg=f"{name}, {kind}")


@pytest.mark.parametrize("cell, dtype", [
    *((cell, "float32") for cell in CELLS), *(slow(cell, "bfloat16") for cell in CELLS),
    *(slow(cell, "float32") for cell in SLOW),
    slow("the tiles of H100", "bfloat16")])
def test_kernels_equal_plain_attention_and_its_gradients(cell, dtype):
    shape = (CELLS | SLOW)[cell]
    for seed, kind in enumerate(KINDS):
        check(shape, kind, dtype, seed)


# ---- which blocks are visited ----------------------------------------------------------------------------------------


@functools.cache
def jitted_spans(block: int, step: int, mask: Mask, own_are_queries: bool):
    return jax.jit(lambda own, other: pallas.spans(own, other, block, step, mask, own_are_queries))


@pytest.mark.parametrize("T, S, mask", [(96, 96, CAUSAL), (64, 128, WHOLE), (96, 96, near(50)),
                                        (64, 96, edge(110, 64))],
                         ids=["causal", "keys before queries", "a window", "a window's edge"])
def test_visited_blocks_hold_every_visible_pair_and_where_documents_ascend_no_other_block(T, S, mask):
    rng, in_vain, visited, bare = np.random.default_rng(0), 0, 0, 0
    for kind in [kind for kind in KINDS for _ in range(6)]:
        q, k = drawn_segments(kind, rng, 1, T, S, mask.causal)
        seen = seen_pairs(q, k, mask)[0]
        for own_are_queries, block, step in ((True, 16, 32), (True, 32, 16), (False, 16, 16), (False, 32, 32)):
            own, other, pairs = (q, k, seen) if own_are_queries else (k, q, seen.T)
            rows = np.asarray(jitted_spans(block, step, mask, own_are_queries)(own, other))[0]
            for i, (start, bare_start, bare_stop, stop) in enumerate(rows):
                of_block = pairs[i * block:(i + 1) * block].reshape(block, -1, step)
                live, full = of_block.any((0, 2)), of_block.all((0, 2))
                assert 0 <= start <= bare_start <= bare_stop <= stop
                assert not live[:start].any() and not live[stop:].any() and full[bare_start:bare_stop].all()
                visited, bare = visited + stop - start, bare + bare_stop - bare_start
                # In a row, padding stands at the end alone, so it is not among keys before queries.
                if kind not in ("no order", "rows that see nothing", *(() if mask.causal else ("padding",))):
                    in_vain += stop - start - live.sum()
    assert in_vain == 0 and visited > bare > 0


# ---- what the GPU's compiler makes of them ---------------------------------------------------------------------------

MAX_SPILLED_BYTES = 128


def ptxas() -> Path:
    """That of the wheels, as XLA itself takes."""
    roots = [root for name in ("nvidia.cuda_nvcc", "nvidia.cu13") for root in compile._find(name)]
    return next(path for root in roots if (path := root / "bin" / "ptxas").is_file())


def resources(gpu: str, widths: tuple[int, int], mask: Mask, scores: Scores,
              folder: Path) -> dict[str, tuple[int, int]]:
    """{kernel: (spilled bytes of a thread, shared memory of a block)} of forward and backward, at the shape of Llama 3
    8B. widths: of keys and of values."""
    B, T, N, K = 1, 8192, 32, 8
    mesh = MeshSpec({}).build(compile.topology(f"{gpu}:1"))
    engine = pallas.engine(tiles.of(widths[0], gpu, bool(scores.softcap), widths[1]), scores)

    def both(q, k, v, segments, o, lse, do):
        return engine.forward(q, k, v, segments, segments, mask), engine.backward(
            q, k, v, segments, segments, o, lse, do, mask)

    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, P()))
    q, k, o, v = (array(jnp.bfloat16, B, T, heads, width) for width in widths for heads in (N, K))
    args = q, k, v, array(jnp.int32, B, T), o, array(jnp.float32, B, T, N), o
    with jax.set_mesh(mesh):
        step = jax.jit(jax.shard_map(both, in_specs=P(), out_specs=P(), check_vma=False)).lower(*args)
        # Optimized as in a run; the other programs of the tests are not.
        options = {"xla_dump_to": str(folder), "xla_dump_emitter_re": "ptx", "xla_backend_optimization_level": 3}
        step.compile(compiler_options=options)
    return used(pallas.NAME, gpu, folder)


def used(kernel: str, gpu: str, folder: Path) -> dict[str, tuple[int, int]]:
    """{name: (spilled bytes of a thread, shared memory of a block)} of the kernels that a compilation has dumped here."""
    launches = "".join(path.read_text() for path in folder.glob("*thunk_sequence.txt"))
    shared = {name: int(size) for name, size in re.findall(
        rf"({kernel}\w*) grid:.*shared_memory: (\d+) bytes", launches)}
    found = {}
    architecture = {8: "sm_80", 9: "sm_90a", 10: "sm_100a"}[hardware.get(gpu).chip.compute_capability]
    for path in folder.glob("*.ptx"):
        if kernel in (text := path.read_text()):
            name = re.search(rf"\.entry ({kernel}\w*)", text).group(1)
            said = subprocess.run([ptxas(), "-v", f"-arch={architecture}", path, "-o", "/dev/null"],
                                  capture_output=True, text=True)
            assert said.returncode == 0, said.stderr[:300]
            found[name] = int(re.search(r"(\d+) bytes spill stores", said.stderr).group(1)), shared[name]
    return found


CAPPED = Scores(224 ** -0.5, 50.0)      # Gemma 2's
COMPILED = [(gpu, widths, mask, scores) for gpu in ("a100-80gb", "h100", "h200", "b200")
            for widths in tiles.COMPILED[9] for mask, scores in (
    (CAUSAL, Scores()), (WHOLE, Scores()), (near(4096), CAPPED), (edge(4096, 2048), Scores()))]
FAST = [("h100", (128, 128), near(4096), Scores()), ("b200", (256, 256), WHOLE, Scores())]


@pytest.mark.skipif(compile.missing_wheels(), reason=f"pip install -e '.[gpu-compile]': no {compile.missing_wheels()}")
@pytest.mark.parametrize("gpu, widths, mask, scores",
                         [*FAST, *(slow(*cell) for cell in COMPILED if cell not in FAST)])
def test_kernels_compiled_for_a_gpu_spill_next_to_nothing_and_fit_its_shared_memory(
        gpu, widths, mask, scores, tmp_path):
    found = resources(gpu, widths, mask, scores, tmp_path)
    assert set(found) == {f"{pallas.NAME}_{what}{mask.label}" for what in ("forward", "dq", "dkv")}
    for name, (spilled, shared) in found.items():
        timed = tiles.COMPILED[9][widths] is not tiles.COMPILED[8][widths] and gpu in ("h100", "h200")
        assert spilled <= (2 if timed else 1) * MAX_SPILLED_BYTES, (name, found)
        assert 0 < shared <= hardware.get(gpu).chip.shared_bytes_per_block, (name, found)


def test_every_gpu_that_can_be_compiled_for_has_tiles_of_every_width():
    for gpu in compile.targets():
        assert all(tiles.of(head_dim, gpu) for head_dim in (16, 64, 65, 128, 200, 256)) and tiles.of(257, gpu) is None
        assert tiles.of(192, gpu, value_dim=128) and tiles.of(64, gpu, value_dim=257) is None
    assert tiles.of(64, "") is None and tiles.of(64, "mi300x") is None
    assert {gpu for gpu, *_ in tiles.TIMED} <= set(hardware.GPUS)
