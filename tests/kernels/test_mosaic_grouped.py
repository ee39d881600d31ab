"""The grouped kernel for Hopper: its numbers and races by jax's interpreter of GPU kernels, when it is taken, and what
the GPU's compiler makes of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_grouped
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernel_resources import check_mosaic

from meshtrain import hardware
from meshtrain.cost.program import compile
from meshtrain.kernels import grouped, mosaic, mosaic_grouped

needs_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="this jax does not interpret GPU kernels with transposed operands")
BLOCK = 128


def drawn(sizes, K: int, N: int, pairs: int):
    """(groups, [(x, w)] of bfloat16, w in the order gkn, each row's group); one block is left over."""
    groups, owner = test_grouped.lay_out(sizes, BLOCK, sum(-(-size // BLOCK) for size in sizes) + 1)
    rng = np.random.default_rng(len(sizes) + K)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
    return groups, [(jnp.where(owner[:, None] >= 0, draw(len(owner), K), 0), draw(len(sizes), K, N))
                    for _ in range(pairs)], owner


# One program and several; widths of every tile; a group without rows, one with a whole block, less than a block each.
CASES = {"256 columns, two tiles": ([200, 0, 128], 128, 512, "gkn", 1, 3),
         "192 columns, two products, turned": ([1, 130], 64, 192, "ngk", 2, 2),
         "128 columns, more programs than tiles": ([5], 192, 128, "kgn", 1, 7),
         "256 columns, two products, one program": ([129, 60, 1], 64, 256, "gnk", 2, 1)}


@needs_interpreter
@pytest.mark.parametrize("sizes, K, N, dims, pairs, programs", CASES.values(), ids=list(CASES))
def test_rows_in_order_are_multiplied_with_their_groups_matrix_without_a_race(sizes, K, N, dims, pairs, programs):
    groups, of, owner = drawn(sizes, K, N, pairs)
    found = mosaic_grouped.rows([(x, test_grouped.in_order(w, "gkn", dims)) for x, w in of], dims, groups.owner,
                                groups.count, programs, plgpu.InterpretGPUParams(detect_races=True))
    expected = sum(test_grouped.multiply(x, np.float64(w), owner) for x, w in of)
    # a rounding of the result, and sums of exact products in float32
    assert test_grouped.near(np.asarray(found)[owner >= 0], expected[owner >= 0], 2 ** -8)


@pytest.mark.parametrize("what, taken", [
    ("rows in order", True), ("rows by number", False), ("something beside", False), ("float32", False),
    ("columns that no tile divides", False), ("sums that no step divides", False), ("two orders of dims", False)])
def test_the_engine_for_hopper_takes_it_where_rows_lie_in_order_and_tiles_are_whole(what, taken, monkeypatch):
    calls = []
    monkeypatch.setattr(mosaic_grouped, "rows", lambda pairs, dims, *rest: calls.append(dims) or jnp.zeros((
        pairs[0][0].shape[0], pairs[0][1].shape[dims.index("n")]), jnp.bfloat16))
    monkeypatch.setattr(grouped, "_triton_rows", lambda *args, **kw: ["Triton"])
    K, N = {"columns that no tile divides": (128, 96), "sums that no step divides": (96, 128)}.get(what, (128, 128))
    groups, ((x, w),), _ = drawn([200, 10], K, N, 1)
    x, w = (a.astype(jnp.float32) for a in (x, w)) if what == "float32" else (x, w)
    engine = grouped.kernels(programs=132)
    one = grouped.GroupedOperands(engine.take(x, jnp.zeros(len(x), jnp.int32)) if what == "rows by number" else x, w,
                                  "gkn")
    pairs = [one, grouped.GroupedOperands(x, w.swapaxes(1, 2), "gnk")] if what == "two orders of dims" else [one]
    more = [lambda y, b: (y * b,), [jnp.ones((len(x), 1))]] if what == "something beside" else []
    found, = engine.rows(pairs, groups, *more)
    assert (calls == ["gkn"]) == taken and (isinstance(found, str)) != taken


def test_hopper_takes_mosaic_kernels_unasked_from_the_jax_on_that_a_gpu_has_compared():
    of = lambda name: mosaic.is_taken_on(hardware.GPUS[name])
    compared = jax.__version_info__ >= mosaic.AUTO_SINCE
    assert [of(name) for name in ("h100", "h200", "a100-80gb", "b200")] == [compared, compared, False, False]
    assert not mosaic.is_taken_on(None)


@pytest.mark.skipif(compile.missing_wheels(), reason=f"pip install -e '.[gpu-compile]': no {compile.missing_wheels()}")
def test_compiled_for_hopper_it_spills_nothing(tmp_path):
    """Of Qwen3 30B-A3B: outward, the gradient of x, and the tiles of 192 and 128."""
    code = """
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from meshtrain.cost.program import compile
from meshtrain.kernels import mosaic_grouped
from meshtrain.sharding.mesh import MeshSpec
mesh = MeshSpec({}).build(compile.topology("h100:1"))
array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, P()))
R, G = 4096, 8
for dims, K, N, pairs in (("gkn", 768, 2048, 1), ("ngk", 768, 2048, 2), ("gkn", 768, 576, 1), ("gnk", 768, 640, 1)):
    of = {"g": G, "k": K, "n": N}
    given = [(array(jnp.bfloat16, R, K), array(jnp.bfloat16, *(of[letter] for letter in dims)))] * pairs
    def call(given, owner, count):
        return mosaic_grouped.rows(given, dims, owner, count, 132)
    with jax.set_mesh(mesh):
        jax.jit(jax.shard_map(call, in_specs=P(), out_specs=P(), check_vma=False)).lower(
            given, array(jnp.int32, R // 128), array(jnp.int32, 1)).compile()
"""
    assert len(check_mosaic(tmp_path, "-c", code)) == 4
