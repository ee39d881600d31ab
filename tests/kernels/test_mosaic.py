"""The Mosaic kernels: the intervals that they visit, and what the GPU's compiler makes of them. Their numbers and
races: test_attention. No GPU is needed; none has run them here.
"""
import re
from functools import partial

import jax.numpy as jnp
import numpy as np
import plain_attention
import pytest
import sampling
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_resources import ROOT, check_mosaic
from test_pallas import MAX_SPILLED_BYTES

from meshtrain.cost.program import compile
from meshtrain.kernels import mosaic, warpgroups
from meshtrain.kernels.engine import CAUSAL, WHOLE, Mask

slow = partial(pytest.param, marks=sampling.GRID)
needs_gpu_compiler = pytest.mark.skipif(
    compile.missing_wheels(), reason=f"pip install -e '.[gpu-compile]': no {compile.missing_wheels()}")


# ---- intervals and bounds --------------------------------------------------------------------------------------------

MASKS = (CAUSAL, WHOLE, Mask(True, 50), Mask(False, 110, 64), Mask(False, 20, 300))
KINDS = plain_attention.KINDS[:-1]          # the tokens of a document are neighbours
LENGTHS = st.sampled_from((1, 127, 128, 200, 300))      # few shapes: each one compiles some fifty operations


@settings(max_examples=25)
@given(st.sampled_from(KINDS), st.sampled_from(MASKS), LENGTHS, LENGTHS, st.integers(0, 2**32))
def test_intervals_hold_the_visible_pairs_and_bounds_visit_no_other_block(kind, mask, T, S, seed):
    rng = np.random.default_rng(seed)
    S = T if mask.causal else S
    q, k = plain_attention.drawn_segments(kind, rng, 1, T, S, mask)
    seen = plain_attention.seen_pairs(q, k, mask)[0]
    for own_are_queries, own, other, pairs in ((True, q, k, seen), (False, k, q, seen.T)):
        low, high, single = map(np.asarray, mosaic.intervals(own, other, mask, own_are_queries))
        at = np.arange(other.shape[1])
        assert single.all() and ((at >= low[0][:, None]) & (at < high[0][:, None]) == pairs).all()
        for step in (64, 128):
            (rows, _, bounds), _ = mosaic._visits(own, other, mask, own_are_queries, step)
            whole = np.zeros((rows.shape[1], -(-other.shape[1] // step) * step), bool)
            whole[:pairs.shape[0], :pairs.shape[1]] = pairs
            blocks = whole.reshape(-1, warpgroups.TILE, whole.shape[1] // step, step)
            live, full = blocks.any((1, 3)), blocks.all((1, 3))
            for i, (start, bare_start, bare_stop, stop) in enumerate(np.asarray(bounds)[0]):
                assert 0 <= start <= bare_start <= bare_stop <= stop
                assert full[i, bare_start:bare_stop].all()
                assert not live[i, :start].any() and not live[i, stop:].any()
                assert live[i].any() or start == stop
                if start < stop:        # nothing is visited in vain at either end
                    assert live[i, start] and live[i, stop - 1]


def test_a_segment_whose_tokens_are_no_neighbours_is_noticed():
    split = jnp.array([[1, 1, 2, 1, 3]])
    assert not mosaic.intervals(split, split, CAUSAL, True)[2][0, 0]
    assert np.asarray(mosaic.intervals(split, split, CAUSAL, True)[2][0, 2])


def test_heads_wider_than_the_kernels_have_none():
    assert [mosaic.widths_of(*pair) for pair in (
        (16, 0), (64, 64), (48, 80), (128, 0), (192, 128), (160, 64), (192, 0), (256, 0), (256, 128))] == [
        (64, 64), (64, 64), (128, 128), (128, 128), (192, 128), (192, 128), None, None, None]


# ---- what the GPU's compiler makes of them ---------------------------------------------------------------------------

COMPILED = [(gpu, widths, softcap, mask) for gpu in ("h100", "h200") for widths in mosaic.BLOCKS for softcap, mask in (
    (0.0, CAUSAL), (0.0, WHOLE), (50.0, Mask(True, 4096)), (0.0, Mask(False, 4096, 2048)))]
COMPILED_FAST = [("h100", (128, 128), 0.0, CAUSAL), ("h100", (192, 128), 0.0, CAUSAL)]


@needs_gpu_compiler
@pytest.mark.parametrize("gpu, widths, softcap, mask", [*COMPILED_FAST, *(
    slow(*cell) for cell in COMPILED if cell not in COMPILED_FAST)])
def test_kernels_compiled_for_hopper_spill_next_to_nothing(gpu, widths, softcap, mask, tmp_path):
    said = check_mosaic(tmp_path, ROOT / "tests" / "mosaic_compiled.py", gpu, *map(str, (
        *widths, softcap, int(mask.causal), mask.window, mask.ahead)), most_spilled=MAX_SPILLED_BYTES)
    assert {re.match(rf"{mosaic.NAME}_(forward|dq|dkv){mask.label}_\d", name)[1] for name in said} == {"forward", "dq", "dkv"}
