"""The Mosaic kernels: their numbers and races by jax's interpreter of GPU kernels, on the CPU; the intervals that they
visit; and what the GPU's compiler makes of them. No GPU is needed; none has run them here.
"""
import functools
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sampling
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu
from test_pallas import MAX_SPILLED_BYTES, documents, plain_backward, plain_forward, seen_pairs

from meshtrain.cost.program import compile
from meshtrain.kernels import mosaic, mosaic_forward, warpgroups
from meshtrain.kernels.engine import CAUSAL, MASKED, WHOLE, Mask, Scores

ROOT = Path(__file__).resolve().parent.parent.parent
slow = partial(pytest.param, marks=sampling.GRID)
needs_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="this jax does not interpret GPU kernels with transposed operands")
needs_gpu_compiler = pytest.mark.skipif(
    compile.missing_wheels(), reason=f"pip install -e '.[gpu-compile]': no {compile.missing_wheels()}")


# ---- segments --------------------------------------------------------------------------------------------------------


def hidden(segments: np.ndarray, first: int, last: int, to: int) -> np.ndarray:
    """These tokens see nothing that has another id; another document begins behind them."""
    out = segments + np.where(np.arange(segments.shape[1]) >= last, 1000, 0)
    out[:, first:last] = to
    return out.astype(np.int32)


def drawn(kind: str, rng, B: int, T: int, S: int, mask: Mask):
    """Segments of queries and keys: the same tokens if causal, else the last T and the S before them."""
    mean = {"one document": 1e9, "rows that see nothing": 1e9, "short documents": 4, "nothing in common": 1}.get(
        kind, S / 3)
    line = documents(rng, B, T + S, mean)
    q, k = (line[:, :T], line[:, :S]) if mask.causal else (line[:, S:], line[:, :S])
    q, k = q.copy(), k.copy()
    if kind == "padding":
        q[:, -T // 3:] = k[:, -S // 3:] = 0
    if kind == "rows that see nothing":
        q, k = hidden(q, T // 4, T // 2, -1), hidden(k, S // 4, S // 2, -2)
    return q, k


KINDS = ("one document", "short documents", "documents", "padding", "rows that see nothing", "nothing in common")


# ---- intervals and bounds --------------------------------------------------------------------------------------------


MASKS = (CAUSAL, WHOLE, Mask(True, 50), Mask(False, 110, 64), Mask(False, 20, 300))


LENGTHS = st.sampled_from((1, 127, 128, 200, 300))      # few shapes: each one compiles some fifty operations


@settings(max_examples=25)
@given(st.sampled_from(KINDS), st.sampled_from(MASKS), LENGTHS, LENGTHS, st.integers(0, 2**32))
def test_intervals_hold_the_visible_pairs_and_bounds_visit_no_other_block(kind, mask, T, S, seed):
    rng = np.random.default_rng(seed)
    S = T if mask.causal else S
    q, k = drawn(kind, rng, 1, T, S, mask)
    seen = seen_pairs(q, k, mask)[0]
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


# ---- numbers ---------------------------------------------------------------------------------------------------------

# T, S, N, K, (width of keys, of values), mask, softcap, kind
FAST = {
    "causal, lengths of no tile": (200, 200, 2, 1, (64, 64), CAUSAL, 0.0, "short documents"),
    "an earlier chunk within a window": (130, 256, 2, 1, (48, 24), Mask(False, 200, 100), 5.0, "rows that see nothing"),
}
SLOW = {
    "heads of 128": (256, 256, 2, 1, (128, 128), CAUSAL, 0.0, "documents"),
    "eight heads of one": (128, 128, 8, 1, (64, 64), CAUSAL, 0.0, "padding"),
    "a window": (300, 300, 2, 2, (64, 64), Mask(True, 70), 0.0, "documents"),
    "an earlier chunk": (140, 260, 4, 2, (80, 128), WHOLE, 0.0, "documents"),
    "nothing in common": (128, 140, 2, 1, (64, 64), WHOLE, 0.0, "nothing in common"),
    "values narrower than keys": (200, 200, 2, 1, (192, 128), CAUSAL, 0.0, "documents"),
    "values narrower than keys, an earlier chunk, softcap": (130, 256, 2, 2, (160, 72), Mask(False, 200, 100), 5.0,
                                                             "rows that see nothing"),
    "one document, softcap": (256, 256, 1, 1, (128, 128), CAUSAL, 30.0, "one document"),
}
TOLERANCE = 1e-2            # of the largest number of a result: o, p and ds are rounded to 8 bits before they are summed


def interpreted(scores: Scores):
    return mosaic.engine(scores, interpret=plgpu.InterpretGPUParams(detect_races=True))


@functools.cache
def prepared(cell, seed: int = 0):
    """(q, k, v, segments of queries and of keys, o, lse, do) in float64 as bfloat16 has them, o and lse as if the
    queries saw other keys as well; (o, lse of these keys), the gradients, rows that see nothing."""
    T, S, N, K, (H, V), mask, softcap, kind = cell
    rng, B = np.random.default_rng(seed), 1
    exact = lambda x: np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)
    q, k, v, do = (exact(rng.standard_normal((B, length, heads, width)))
                   for length, heads, width in ((T, N, H), (S, K, H), (S, K, V), (T, N, V)))
    segments = drawn(kind, rng, B, T, S, mask)
    seen = seen_pairs(*segments, mask)
    o, lse = plain_forward(q, k, v, seen, softcap)
    elsewhere = rng.standard_normal(lse.shape)
    together = np.logaddexp(lse, elsewhere)
    whole = exact(o * np.exp(lse - together)[..., None]
                  + rng.standard_normal(o.shape) * np.exp(elsewhere - together)[..., None])
    grads = plain_backward(q, k, v, seen, whole, together, do, softcap)
    return (q, k, v, *segments, whole, together, do), (o, lse), grads, ~seen.any(2)


def errors(cell, forward=True, backward=True) -> dict[str, float]:
    """Of the largest number of each result, at least 1."""
    (q, k, v, q_segments, k_segments, whole, together, do), (o, lse), grads, nothing = prepared(cell)
    assert nothing.all() == (cell[7] == "nothing in common")
    engine, mask = interpreted(Scores(softcap=cell[6])), cell[5]
    of = lambda *arrays: [jnp.asarray(x, jnp.bfloat16) for x in arrays]
    args = *of(q, k, v), jnp.asarray(q_segments), jnp.asarray(k_segments)
    got, expected = {}, {}
    if forward:
        got["o"], got["lse"] = map(np.asarray, engine.forward(*args, mask))
        assert got["o"].dtype == got["lse"].dtype == np.float32
        assert not got["o"][nothing].any() and (got["lse"][nothing] == np.float32(MASKED)).all()
        got["lse"] = np.where(nothing[..., None], 0, got["lse"])
        expected |= {"o": o, "lse": np.where(nothing[..., None], 0, lse)}
    if backward:
        results = engine.backward(*args, *of(whole), jnp.asarray(together, jnp.float32), *of(do), mask)
        got |= dict(zip(("dq", "dk", "dv"), map(np.asarray, results)))
        expected |= dict(zip(("dq", "dk", "dv"), grads))
    return {name: float(np.abs(got[name] - expected[name]).max() / max(1.0, np.abs(expected[name]).max()))
            for name in got}


@needs_interpreter
@pytest.mark.parametrize("cell", [*FAST, *map(slow, SLOW)])
def test_kernels_equal_plain_attention_and_its_gradients_without_a_race(cell):
    found = errors((FAST | SLOW)[cell])
    assert max(found.values()) <= TOLERANCE and found["lse"] <= 1e-5, found


# ---- planted faults --------------------------------------------------------------------------------------------------

SMALL = (128, 256, 1, 1, (64, 64), WHOLE, 0.0, "documents")


class Without:
    """jax's module without one of its functions."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name):
        return (lambda *_, **__: None) if name == self._name else getattr(plgpu, name)


def off_by_one(bounds):
    def wrong(*args):
        found = bounds(*args)
        return jnp.minimum(found, jnp.maximum(found[..., 3:] - 1, found[..., :1]))      # the last step is left out
    return wrong


FAULTS = {
    "a bound is off by one": lambda patch: patch.setattr(mosaic, "bounds", off_by_one(mosaic.bounds)),
    "no row counts as one that has seen nothing": lambda patch: patch.setattr(mosaic_forward, "SOME", -jnp.inf),
    "no barrier is waited for": lambda patch: patch.setattr(mosaic_forward, "plgpu", Without("barrier_wait")),
    "memory is not committed before it is stored": lambda patch: patch.setattr(
        mosaic_forward, "plgpu", Without("commit_smem")),
}


@needs_interpreter
@pytest.mark.parametrize("fault", ["a bound is off by one", *map(slow, [name for name in FAULTS if "bound" not in name])])
def test_a_planted_fault_is_found(fault, monkeypatch):
    FAULTS[fault](monkeypatch)
    cell = SMALL if "row" not in fault else SMALL[:7] + ("rows that see nothing",)
    try:
        found = errors(cell, backward=False)
    except jax.errors.JaxRuntimeError as error:
        assert "race detected" in str(error).lower(), error
        return
    except AssertionError:          # rows that see nothing are no zeros
        return
    assert not max(found.values()) <= TOLERANCE, found


# ---- what the GPU's compiler makes of them ---------------------------------------------------------------------------

COMPILED = [(gpu, widths, softcap, mask) for gpu in ("h100", "h200") for widths in mosaic.BLOCKS for softcap, mask in (
    (0.0, CAUSAL), (0.0, WHOLE), (50.0, Mask(True, 4096)), (0.0, Mask(False, 4096, 2048)))]
COMPILED_FAST = [("h100", (128, 128), 0.0, CAUSAL), ("h100", (192, 128), 0.0, CAUSAL)]


@needs_gpu_compiler
@pytest.mark.parametrize("gpu, widths, softcap, mask", [*COMPILED_FAST, *(
    slow(*cell) for cell in COMPILED if cell not in COMPILED_FAST)])
def test_kernels_compiled_for_hopper_spill_next_to_nothing(gpu, widths, softcap, mask, tmp_path):
    """In a process of its own: jax reads where to write the compiler's report when it is imported."""
    environ = os.environ | {"MOSAIC_GPU_DUMP_TO": str(tmp_path), "MOSAIC_GPU_DUMP_PTXAS": "1"}
    environ.pop("XLA_FLAGS", None)
    ran = subprocess.run([sys.executable, ROOT / "tests" / "mosaic_compiled.py", gpu, *map(str, (
        *widths, softcap, int(mask.causal), mask.window, mask.ahead))], env=environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    said = {path.name: path.read_text() for path in tmp_path.glob("*.ptxas")}
    assert {re.match(rf"{mosaic.NAME}_(forward|dq|dkv){mask.label}_\d", name)[1] for name in said} == {
        "forward", "dq", "dkv"}
    for name, text in said.items():
        spilled = [int(count) for count in re.findall(r"(\d+) bytes spill stores", text)]
        registers = re.findall(r"Used (\d+) registers", text)
        assert spilled and max(spilled) <= MAX_SPILLED_BYTES, (name, spilled)
        assert registers == ["168"], (name, registers)      # of 65,536 for 384 threads, before setmaxnreg
        assert "serialized" not in text, name
