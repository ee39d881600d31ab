"""Grouped matmuls against a loop over groups in numpy, and what the GPUs' compilers make of the kernels."""
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from kernel_resources import Resources, compile_dumped, used

from meshtrain.cost.program import compile
from meshtrain.kernels import grouped, tiles
from meshtrain.sharding.mesh import MeshSpec

NARROW = tiles.GroupedBlock(16, 16, 16, 4, 2)
SMALL = dict.fromkeys((2, 4), tiles.GroupedTiles(NARROW._replace(columns=32), NARROW, NARROW, NARROW, deep_from=32))
ENGINES = {"loop": grouped.loop(), "kernels": grouped.kernels(SMALL, interpret=True)}
# Rows of each group: odd ones, one that has all, none at all, whole blocks, one group.
SIZES = ([5, 16, 33, 0, 1], [0, 0, 64, 0, 0], [0] * 5, [16, 32, 16, 0, 0], [17])
# A rounding of the result's dtype, twice over.
TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2}


def lay_out(sizes: list[int], block: int, num_blocks: int):
    """(groups, int [R] each row's group, -1 where there is none)."""
    groups = grouped.groups_of(jnp.array(sizes, jnp.int32), num_blocks, block)
    owner = np.full(num_blocks * block, -1)
    for group, size in enumerate(sizes):
        owner[int(groups.first[group]) * block:][:size] = group
    return groups, owner


def in_order(w, dims: str, into: str):
    return w.transpose([dims.index(letter) for letter in into])


def multiply(x_RK, w_GKN, owner) -> np.ndarray:
    """Plainly, a row at a time; float64 [R, N]."""
    return np.stack([row @ w_GKN[group] for row, group in zip(np.float64(x_RK), owner)])


def near(found, expected, tolerance: float) -> bool:
    """Of the largest number, or 1."""
    return np.abs(np.float64(found) - expected).max(initial=0) <= tolerance * max(1, np.abs(expected).max(initial=0))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("dims", ["gkn", "kgn"])
def test_every_group_is_multiplied_with_its_own_matrix(dims, name, dtype, K=33, N=48):
    engine, turned, rng = ENGINES[name], dims.translate(str.maketrans("kn", "nk")), np.random.default_rng(0)

    @jax.jit
    def products(x, y, w, groups):
        with jax.default_matmul_precision("highest"):
            back = [grouped.GroupedOperands(y, w, turned), grouped.GroupedOperands(y, 2 * w, turned)]
            return (*engine.rows([grouped.GroupedOperands(x, w, dims)], groups), *engine.rows(back, groups),
                    engine.outer(x, y, groups, dims))
    for sizes in SIZES:
        groups, owner = lay_out(sizes, 16, 8)
        used = owner >= 0
        rows = lambda width: jnp.asarray(rng.normal(size=(len(owner), width)) * used[:, None], dtype)
        x, y, w = rows(K), rows(N), jnp.asarray(rng.normal(size=(len(sizes), K, N)), dtype)
        product, back, outer = jax.device_get(products(x, y, in_order(w, "gkn", dims), groups))
        assert np.isfinite(np.float64(product[0])).all()        # row 0 is read by whoever has no row
        x, y, w = (np.asarray(a, np.float64) for a in (x, y, w))
        assert near(product[used], multiply(x, w, owner)[used], TOLERANCE[dtype])
        assert near(back[used], multiply(y, 3 * w.swapaxes(1, 2), owner)[used], TOLERANCE[dtype])
        plain = np.stack([x[owner == group].T @ y[owner == group] for group in range(len(sizes))])
        assert near(in_order(outer, dims, "gkn"), plain, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ENGINES)
def test_rows_are_taken_by_number_and_products_go_on_at_once(name, dtype, A=24, K=33, N=40):
    """As in an expert's backward: of taken rows times a matrix, with numbers beside each row and each element,
    elementwise results and a sum over the columns; then outer products with taken rows on either side."""
    engine, rng = ENGINES[name], np.random.default_rng(1)

    def then(product, share, beside):
        return product * share, (product * beside).sum(1), product + beside

    @jax.jit
    def made(x, w, number, share, beside, groups):
        with jax.default_matmul_precision("highest"):
            x_R = engine.take(x, number)
            first, summed, second = engine.rows([grouped.GroupedOperands(x_R, w, "gkn")], groups, then, [share, beside])
            return first, summed, second, engine.outer(x_R, first, groups, "kgn"), engine.outer(
                second, x_R, groups, "gkn")
    for sizes in SIZES:
        groups, owner = lay_out(sizes, 16, 8)
        used, number = owner >= 0, np.where(owner >= 0, rng.integers(0, A, len(owner)), -1).astype(np.int32)
        x, w = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((A, K), (len(sizes), K, N)))
        share, beside = jnp.asarray(rng.normal(size=(len(owner), 1)), "float32"), jnp.asarray(
            rng.normal(size=(len(owner), N)) * used[:, None], dtype)
        found = made(x, w, number, share, beside, groups)
        assert [a.dtype for a in found] == [dtype, "float32", dtype, "float32", "float32"]
        first, summed, second, into, back, x, w, share, beside = (
            np.asarray(a, np.float64) for a in (*found, x, w, share, beside))
        rows = np.where(used[:, None], x[number], 0)
        for got, want in zip((first, summed, second), then(multiply(rows, w, owner), share, beside)):
            assert near(got[used], want[used], TOLERANCE[dtype])
        for group in range(len(sizes)):
            mine = owner == group
            assert near(into[:, group], rows[mine].T @ first[mine], TOLERANCE[dtype])
            assert near(back[group], second[mine].T @ rows[mine], TOLERANCE[dtype])


def test_the_large_tile_is_for_deep_sums_with_nothing_beside():
    tile = tiles.GROUPED[2]
    assert [tile.of(*of).columns for of in ((4096, 0), (2048, 0), (768, 0), (4096, 1), (768, 1), (4096, 2))] == [
        256, 256, 128, 128, 128, 64]


def test_blocks_fill_up_less_than_a_block_for_each_group():
    for rows, of in ((64, 8), (4096, 8), (1, 64), (100000, 16)):
        assert 8 <= grouped.loop().block(rows, of) <= 128 and grouped.kernels().block(rows, of) == tiles.GROUPED[2].rows


# Qwen3-30B-A3B, gpt-oss's width, which no power of two beyond 64 divides, and Mixtral.
SHAPES = {"2048 × 768": (2048, 768), "2880 × 2880": (2880, 2880), "4096 × 14336": (4096, 14336)}


@pytest.mark.skipif(compile.missing_wheels(), reason=f"pip install -e '.[gpu-compile]': no {compile.missing_wheels()}")
@pytest.mark.parametrize("gpu, shape, dtype", [
    (gpu, shape, dtype) if (gpu, shape, dtype) in (("h100", "2048 × 768", "bfloat16"),
                                                   ("b200", "2048 × 768", "bfloat16"))
    else pytest.param(gpu, shape, dtype, marks=pytest.mark.long)
    for gpu in ("a100-80gb", "h100", "h200", "b200") for shape in SHAPES for dtype in ("bfloat16", "float32")])
def test_kernels_compiled_for_a_gpu_spill_nothing_and_need_no_memory_beside_their_results(gpu, shape, dtype, tmp_path):
    found = resources(gpu, *SHAPES[shape], dtype, tmp_path)
    assert sorted(re.sub(r"_+\d+$", "", name) for name in found) == sorted([
        *["grouped_rows_gkn", "grouped_rows_kgn"] * 3, "grouped_rows_gnk", "grouped_rows_ngk",
        "grouped_outer_gkn", "grouped_outer_gkn", "grouped_outer_kgn"])
    for name, one in found.items():
        assert one.registers <= 255 and one.spilled_bytes <= (8 if dtype == "float32" else 0), (name, found)


def resources(gpu: str, D: int, F: int, dtype: str, folder: Path) -> dict[str, Resources]:
    """Those of the products of 16 groups, in the orders that experts have."""
    E, engine, mesh = 16, grouped.kernels(), MeshSpec({}).build(compile.topology(f"{gpu}:1"))
    block = engine.block(0, E)
    blocks = 65536 // block + E
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

    def weighted(up, share, gate):
        return jax.nn.silu(gate.astype(jnp.float32)) * up * share,

    def gradients(dhw, share, gate, up):
        h, back = jax.vjp(lambda gate, up: jax.nn.silu(gate) * up, gate.astype(jnp.float32), up.astype(jnp.float32))
        return h * share, (dhw * h).sum(1), *back(dhw * share)

    def products(x, y, z, w, turned, number, share, sizes):
        groups, x_R, out = grouped.groups_of(sizes, blocks, block), engine.take(x, number), []
        for matrices, into, back in ((w, "gkn", "gnk"), (turned, "kgn", "ngk")):
            inward = [grouped.GroupedOperands(x_R, matrices, into)]
            out += engine.rows(inward, groups), engine.rows(inward, groups, weighted, [share, y]), engine.rows(
                inward, groups, gradients, [share, y, z])
            out += engine.rows([grouped.GroupedOperands(y, matrices, back), grouped.GroupedOperands(z, matrices, back)],
                               groups), engine.outer(x_R, y, groups, into)
        return out, engine.outer(x_R, y, groups, "gnk")
    rows, tokens = blocks * block, 8192
    args = (array(dtype, tokens, D), array(dtype, rows, F), array(dtype, rows, F), array(dtype, E, D, F),
            array(dtype, D, E, F),
            array(jnp.int32, rows), array(jnp.float32, rows, 1), array(jnp.int32, E))
    with jax.set_mesh(mesh):
        compiled = compile_dumped(jax.jit(products).lower(*args), folder)
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20 and "dot(" not in compiled.as_text()
    return used("grouped_", gpu, folder)


def test_narrow_matrices_beside_a_wide_one_leave_it_its_kernel(monkeypatch):
    """As with adapters: x·W by `mosaic_grouped` alone, and what (x·A)·B adds to it by the other kernels."""
    groups, owner = lay_out([100, 128, 3], 128, 4)
    rng, used, called = np.random.default_rng(2), owner >= 0, []

    def mosaic(pairs, dims, owner, count, programs):
        called.extend(x.shape for x, _ in pairs)
        return ENGINES["loop"].rows([grouped.GroupedOperands(x, w, dims) for x, w in pairs], groups)[0]
    monkeypatch.setattr(grouped.mosaic_grouped, "rows", mosaic)
    (x, w), (h, b) = ((jnp.asarray(rng.normal(size=(512, K)) * used[:, None], "bfloat16"),
                       jnp.asarray(rng.normal(size=(3, K, 128)), "bfloat16")) for K in (64, 4))
    block = NARROW._replace(rows=128)
    engine = grouped.kernels({2: tiles.GroupedTiles(block, block, block, block)}, interpret=True, programs=4)
    (found,) = engine.rows([grouped.GroupedOperands(x, w, "gkn"), grouped.GroupedOperands(h, b, "gkn")], groups)
    x, w, h, b = (np.asarray(a, np.float64) for a in (x, w, h, b))
    assert called == [(512, 64)]
    assert near(np.asarray(found)[used], (multiply(x, w, owner) + multiply(h, b, owner))[used], TOLERANCE["bfloat16"])
