"""The Pallas kernels: which blocks they visit, and what the GPU's compiler makes of them: registers that spill, shared
memory. Their numbers: test_attention. No GPU is needed; none has run them here.
"""
import functools
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import plain_attention
import pytest
import sampling
from jax.sharding import PartitionSpec as P
from kernel_resources import Resources, compile_dumped, used

from meshtrain import hardware
from meshtrain.cost.program import compile
from meshtrain.kernels import pallas, tiles
from meshtrain.kernels.engine import CAUSAL, WHOLE, Mask, Scores
from meshtrain.sharding.mesh import MeshSpec

slow = partial(pytest.param, marks=sampling.GRID)
near = lambda window: CAUSAL._replace(window=window)
edge = lambda window, ahead: Mask(False, window, ahead)


# ---- which blocks are visited ----------------------------------------------------------------------------------------


@functools.cache
def jitted_spans(block: int, step: int, mask: Mask, own_are_queries: bool):
    return jax.jit(lambda own, other: pallas.spans(own, other, block, step, mask, own_are_queries))


@pytest.mark.parametrize("T, S, mask", [(96, 96, CAUSAL), (64, 128, WHOLE), (96, 96, near(50)),
                                        (64, 96, edge(110, 64))],
                         ids=["causal", "keys before queries", "a window", "a window's edge"])
def test_visited_blocks_hold_every_visible_pair_and_where_documents_ascend_no_other_block(T, S, mask):
    rng, in_vain, visited, bare = np.random.default_rng(0), 0, 0, 0
    for kind in plain_attention.KINDS * 6:
        q, k = plain_attention.drawn_segments(kind, rng, 1, T, S, mask)
        seen = plain_attention.seen_pairs(q, k, mask)[0]
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


def resources(gpu: str, widths: tuple[int, int], mask: Mask, scores: Scores,
              folder: Path) -> dict[str, Resources]:
    """Those of forward and backward, at the shape of Llama 3 8B. widths: of keys and of values."""
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
    compile_dumped(step, folder)
    return used(pallas.NAME, gpu, folder)


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
    for name, one in found.items():
        timed = tiles.COMPILED[9][widths] is not tiles.COMPILED[8][widths] and gpu in ("h100", "h200")
        assert one.spilled_bytes <= (2 if timed else 1) * MAX_SPILLED_BYTES, (name, found)


def test_every_gpu_that_can_be_compiled_for_has_tiles_of_every_width():
    for gpu in compile.targets():
        assert all(tiles.of(head_dim, gpu) for head_dim in (16, 64, 65, 128, 200, 256)) and tiles.of(257, gpu) is None
        assert tiles.of(192, gpu, value_dim=128) and tiles.of(64, gpu, value_dim=257) is None
    assert tiles.of(64, "") is None and tiles.of(64, "mi300x") is None
    assert {gpu for gpu, *_ in tiles.TIMED} <= set(hardware.GPUS)
