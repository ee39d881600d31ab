"""The audit reads real and hand-written HLO as counted by hand. Needs 8 simulated CPU devices (conftest)."""
import collections
import itertools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshtrain.cost.program import audit


def fake_mesh(**shape):
    return types.SimpleNamespace(shape=shape)


def module(body: str, extra: str = "") -> str:
    """A program whose entry is `body`, one instruction a line, given x = f32[64]."""
    lines = "\n".join("  " + line.strip() for line in body.strip().splitlines())
    return (f"HloModule m\n\n{extra}\nENTRY %main (x: f32[64]) -> f32[64] {{\n  %x = f32[64]{{0}} "
            f"parameter(0)\n{lines}\n}}\n")


def collectives(text, mesh):
    return list(audit.read(text, mesh).require_known().collectives)


def only(text, mesh):
    (row,) = collectives(text, mesh)
    return row


# ---- groups ----------------------------------------------------------------------------------------------------------


def brute_force_groups(shape, axes):
    groups = collections.defaultdict(list)
    for i, where in enumerate(itertools.product(*map(range, shape.values()))):
        groups[tuple(c for a, c in zip(shape, where) if a not in axes)].append(i)
    return sorted(groups.values())


def spellings(shape, axes):
    """The same groups in HLO's three forms."""
    sizes, names = list(shape.values()), list(shape)
    n, members = math.prod(sizes), math.prod(shape[a] for a in axes)
    order = [i for i, a in enumerate(names) if a not in axes] + [i for i, a in enumerate(names) if a in axes]
    listed = ",".join("{" + ",".join(map(str, g)) + "}" for g in brute_force_groups(shape, axes))
    return [
        f"replica_groups={{{listed}}}, use_global_device_ids=true",
        f"replica_groups=[{n // members},{members}]<=[{','.join(map(str, sizes))}]T({','.join(map(str, order))}), x=1",
        "replica_groups=mesh[" + ",".join(f"'{a}'={s}" for a, s in shape.items()) + "] {"
        + ",".join(f"'{a}'" for a in axes) + "}, x=1",
    ]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_three_spellings_of_groups_agree_with_brute_force(sizes, data):
    shape = {f"axis{i}": s for i, s in enumerate(sizes)}
    axes = data.draw(st.lists(st.sampled_from(list(shape)), min_size=1, unique=True).map(lambda a: sorted(a)))
    for text in spellings(shape, axes):
        groups = audit.replica_groups(text, math.prod(sizes))
        assert sorted(sorted(g) for g in groups.tolist()) == brute_force_groups(shape, axes)
        assert audit.group_axes(groups, shape) == tuple(a for a in axes if shape[a] > 1)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_three_spellings_of_groups_agree_on_every_axis_subset(count):
    shape = dict(stage=4, data=2, tensor=8)
    for axes in itertools.combinations(shape, count):
        for text in spellings(shape, axes):
            groups = audit.replica_groups(text, 64)
            assert sorted(sorted(g) for g in groups.tolist()) == brute_force_groups(shape, axes)
            assert audit.group_axes(groups, shape) == axes


def test_mesh_groups_follow_device_ids_not_names():
    text = ("replica_groups=mesh['axis_0'=32,'axis_1'=1,'axis_2'=8,'axis_3'=4], device_ids=([4,256]T(1,0)) {'axis_2'}, "
            "x=1")
    groups = audit.replica_groups(text, 1024)
    ids = np.arange(1024).reshape(4, 256).T.reshape(32, 1, 8, 4)
    assert sorted(groups[1]) == sorted(ids[0, 0, :, 1])
    assert audit.group_axes(groups, dict(stage=4, data=32, tensor=8)) == ("tensor",)


def test_part_of_an_axis_is_named_with_its_size():
    half = audit.replica_groups("replica_groups=mesh['a'=8,'b'=2] {'a':(2)2}, x", 16)
    assert sorted(half[0]) == [0, 4]  # a = 2×2×2, the middle factor: stride 2 in a, 4 in the id
    assert audit.group_axes(half, dict(a=8, b=2)) == ("a:2~",)
    both = audit.replica_groups("replica_groups=mesh['a'=8,'b'=2] {'a':(1)2,'a':(4)2}, x", 16)
    assert sorted(both[0]) == [0, 2, 8, 10]
    assert audit.group_axes(audit.replica_groups("replica_groups=mesh['a'=8,'b'=2] {'a':(4)2,'b'}, x", 16),
                            dict(a=8, b=2)) == ("a:2~", "b")


def test_groups_that_are_no_product_of_axes_are_marked():
    diagonal = audit.replica_groups("replica_groups={{0,3},{1,2}}, x", 4)
    assert audit.group_axes(diagonal, dict(data=2, tensor=2)) == ("data:2~", "tensor:2~")


def test_empty_groups_mean_everyone():
    assert audit.replica_groups("replica_groups={}, x", 8).tolist() == [list(range(8))]


def test_unknown_spelling_of_groups_is_an_error():
    with pytest.raises(ValueError, match="spelling"):
        audit.replica_groups("replica_groups=future(1)", 8)


# ---- kinds, bytes, dtypes --------------------------------------------------------------------------------------------

DATA4 = "replica_groups=[2,4]<=[4,2]T(1,0)"  # of the mesh data=4 × tensor=2
MESH = fake_mesh(data=4, fsdp=1, tensor=2)


@pytest.mark.parametrize(
    "line, kind, payload, ring",
    [
        (f"%r = f32[64]{{0}} all-reduce(%x), {DATA4}, to_apply=%add", "all-reduce", 256, 384),
        (f"%r = f32[256]{{0}} all-gather(%x), {DATA4}, dimensions={{0}}", "all-gather", 1024, 768),
        (f"%r = f32[16]{{0}} reduce-scatter(%x), {DATA4}, dimensions={{0}}, to_apply=%add", "reduce-scatter", 256, 192),
        (f"%r = f32[64]{{0}} all-to-all(%x), {DATA4}, dimensions={{0}}", "all-to-all", 256, 192),
    ],
)
def test_payload_and_ring_bytes(line, kind, payload, ring):
    row = only(module(line), MESH)
    assert (row.kind, row.axes, row.group_size, row.count, row.dtype) == (kind, ("data",), 4, 1, "f32")
    assert (row.payload_bytes, row.bytes) == (payload, ring)


def test_permute_sends_its_payload():
    pairs = ",".join(f"{{{i},{(i + 2) % 8}}}" for i in range(8))
    row = only(module(f"%r = f32[64]{{0}} collective-permute(%x), source_target_pairs={{{pairs}}}"), MESH)
    assert (row.kind, row.axes, row.bytes, row.payload_bytes, row.group_size) == (
        "collective-permute", ("data",), 256, 256, 4)


def test_combined_operands_are_counted_apart_and_split_by_dtype():
    text = module(f"""
        %h = bf16[64]{{0}} convert(%x)
        %s = ((f32[64], f32[64], bf16[64]), (f32[256], f32[256], bf16[256])) all-gather-start(%x, %x, /*index=2*/%h), {DATA4}, dimensions={{0}}, metadata={{op_name="jit(step)/while/body/mlp/dot_general"}}, backend_config={{"collective_backend_config":{{"is_sync":false}}}}
        %d = (f32[256], f32[256], bf16[256]) all-gather-done(%s)""")
    rows = {r.dtype: r for r in collectives(text, MESH)}
    assert {d: (r.count, r.bytes) for d, r in rows.items()} == {"f32": (2, 1536), "bf16": (1, 384)}
    assert all(r.source == "mlp/dot_general" for r in rows.values())


def test_source_that_xla_dropped_is_that_of_the_operand():
    text = module(f"""
        %d = f32[64]{{0}} multiply(%x, %x), metadata={{op_name="jit(step)/mlp/mul"}}
        %b = f32[64]{{0}} bitcast(%d)
        %r = f32[16]{{0}} reduce-scatter(%b), {DATA4}, dimensions={{0}}, to_apply=%add""")
    assert only(text, MESH).source == "mlp/mul"


def test_async_wrapper_is_followed_once():
    wrapped = f"""%wrapped (p: f32[64]) -> f32[16] {{
  %p = f32[64]{{0}} parameter(0)
  ROOT %rs = f32[16]{{0}} reduce-scatter(%p), {DATA4}, dimensions={{0}}, to_apply=%add
}}
"""
    text = module(
        """%s = ((f32[64]), f32[16], u32[]) async-start(%x), calls=%wrapped
           %u = ((f32[64]), f32[16], u32[]) async-update(%s), calls=%wrapped
           %d = f32[16] async-done(%u), calls=%wrapped""",
        wrapped,
    )
    row = only(text, MESH)
    assert (row.kind, row.count, row.bytes) == ("reduce-scatter", 1, 192)


def test_tuple_all_to_all_is_one_logical_array():
    operands = ", ".join(["%x"] * 4)
    row = only(module(f"%r = (f32[64], f32[64], f32[64], f32[64]) all-to-all({operands}), {DATA4}"), MESH)
    assert (row.count, row.payload_bytes, row.bytes) == (1, 1024, 768)


def test_groups_of_one_device_are_dropped():
    text = module("%r = f32[64] all-reduce(%x), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add")
    assert collectives(text, MESH) == []


def test_summary_merges_by_kind_axes_and_dtype():
    two = module(f"%r = f32[64] all-reduce(%x), {DATA4}\n%q = f32[64] all-reduce(%r), {DATA4}\n%p = f32[64] "
                 f"all-reduce(%x), replica_groups=[4,2]<=[8]")
    rows = audit.summarize(collectives(two, MESH))
    assert [(r["kind"], r["axes"], r["count"], r["bytes"]) for r in rows] == [
        ("all-reduce", ["data"], 2, 768),
        ("all-reduce", ["tensor"], 1, 256),
    ]
    assert set(rows[0]) == {"kind", "axes", "count", "bytes", "dtype", "source", "line"}


# ---- permutes that lose data -----------------------------------------------------------------------------------------


def test_permute_with_empty_pairs_is_broken():
    program = audit.read(module("%r = f32[64] collective-permute(%x), source_target_pairs={}"), MESH)
    assert len(program.broken_permutes) == 1 and "EMPTY" in program.broken_permutes[0]
    assert not program.collectives


def test_permute_that_misses_devices_is_broken_and_says_how_many():
    program = audit.read(module("%r = f32[64] collective-permute(%x), source_target_pairs={{0,1},{1,0},{2,4}}"), MESH)
    assert "covers 3 of 8" in program.broken_permutes[0]


def test_parts_of_a_slice_need_not_cover_all_devices_but_an_empty_permute_is_broken_wherever_it_stands():
    """As XLA cuts 4 layers out of 12 slots that lie over 4 stages."""
    def named(pairs):
        return module(f'%r = f32[64] collective-permute(%x), source_target_pairs={pairs}, '
                      f'metadata={{op_name="jit(train)/slice"}}')
    text = named("{{0,1},{1,3},{4,5},{5,7}}")
    assert not audit.read(text, MESH).broken_permutes and not audit.broken_permutes(text, MESH)
    assert audit.broken_permutes(named("{}"), MESH) and audit.read(named("{}"), MESH).broken_permutes


def test_what_xla_recomputes_by_itself_is_counted():
    text = module("%a = f32[64] add(%x, %x)\n%a.remat = f32[64] add(%x, %x)\n%a.5.remat2.1 = f32[64] add(%a.remat, %x)")
    assert audit.count_recomputed(text) == 2
    assert audit.count_recomputed(module("%remat.1 = f32[64] add(%x, %x)")) == 0, "ours, by jax.checkpoint"


def test_a_ring_shift_and_an_open_shift_are_not_broken():
    ring = ",".join(f"{{{i},{i ^ 1}}}" for i in range(8))
    program = audit.read(module(f"%r = f32[64] collective-permute(%x), source_target_pairs={{{ring}}}"), MESH)
    assert not program.broken_permutes
    chain = ",".join(f"{{{i},{i + 2}}}" for i in range(6))
    program = audit.read(module(f"%r = f32[64] collective-permute(%x), source_target_pairs={{{chain}}}"), MESH)
    assert not program.broken_permutes


# ---- loops -----------------------------------------------------------------------------------------------------------


def loop(trips: int | None = None):
    """A loop with an all-reduce and a dot in its body. trips: as XLA notes them; None: it does not."""
    extra = f"""%body (s: (s32[], f32[64])) -> (s32[], f32[64]) {{
  %s = (s32[], f32[64]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %a = f32[64] get-tuple-element(%s), index=1
  %r = f32[64] all-reduce(%a), {DATA4}, to_apply=%add
  %d = f32[] dot(%r, %r), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}
  ROOT %t = (s32[], f32[64]) tuple(%i, %r)
}}

%cond (s: (s32[], f32[64])) -> pred[] {{
  %s = (s32[], f32[64]) parameter(0)
  ROOT %go = pred[] constant(true)
}}
"""
    known = "" if trips is None else f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
    return module(
        f"""%zero = s32[] constant(0)
        %init = (s32[], f32[64]) tuple(%zero, %x)
        %w = (s32[], f32[64]) while(%init), condition=%cond, body=%body, metadata={{op_name="jit(step)/while"}}{known}""",
        extra,
    )


def test_known_trip_count_multiplies():
    program = audit.read(loop(7), MESH)
    assert program.collectives[0].count == 7 and program.flops == {"f32": 7 * 2 * 64} and not program.unknown_loops


def test_loop_that_never_runs_has_no_collectives():
    assert collectives(loop(0), MESH) == []


def test_unknown_loop_is_named_and_refused_where_totals_are_asked_for():
    program = audit.read(loop(), MESH)
    assert program.collectives[0].count == 1 and program.unknown_loops == ("w in main (jit(step)/while)",)
    with pytest.raises(ValueError, match=r"w in main .*lax.scan"):
        collectives(loop(), MESH)


def test_unknown_loop_without_collectives_or_dots_does_not_matter():
    text = "\n".join(l for l in loop().splitlines() if "all-reduce(" not in l and " dot(" not in l)
    assert audit.read(text.replace("%i, %r", "%i, %a"), MESH).unknown_loops == ()


def test_collective_in_a_branch_is_marked():
    extra = f"""%yes (p: f32[64]) -> f32[64] {{
  %p = f32[64] parameter(0)
  ROOT %r = f32[64] all-reduce(%p), {DATA4}, to_apply=%add
}}

%no (p: f32[64]) -> f32[64] {{
  ROOT %p = f32[64] parameter(0)
}}
"""
    text = module("%k = s32[] constant(0)\n%c = f32[64] conditional(%k, %x, %x), branch_computations={%yes, %no}",
                  extra)
    assert only(text, MESH).in_branch and only(text, MESH).count == 1
    seldom = text.replace("branch_computations={%yes, %no}",
                          'branch_computations={%yes, %no}, '
                          'metadata={op_name="jit(step)/while/body/taken_1_of_4/cond"}')
    assert only(seldom, MESH).count == 0, "once in four executions, and here there is one"


# ---- matmuls ---------------------------------------------------------------------------------------------------------


def test_cublas_call_counts_from_its_dimension_numbers():
    text = module("""
        %a = bf16[8,16]{1,0} convert(%x)
        %b = bf16[16,32]{1,0} convert(%x)
        %g = (bf16[8,32]{1,0}, s8[4194304]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}
        %f = bf16[8,32]{1,0} custom-call(%a, %b), custom_call_target="__cudnn$fmhaSoftmax", backend_config={"bmm1":{"lhs_contracting_dimensions":["1"]}}""")
    program = audit.read(text, MESH)
    assert program.flops == {"bf16": 2 * 8 * 32 * 16}
    assert len(program.uncounted) == 1 and "fmhaSoftmax" in program.uncounted[0]


# ---- real programs ---------------------------------------------------------------------------------------------------


def compile_(f, in_specs, shapes, mesh):
    shardings = [NamedSharding(mesh, s) for s in in_specs]
    args = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=h) for s, h in zip(shapes, shardings)]
    return jax.jit(f).lower(*args).compile().as_text()


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def test_scanned_tensor_parallel_mlp_reduces_once_per_layer(mesh):
    """3 layers of x → x·A·B, A split over columns and B over rows: one all-reduce of x a layer, two matmuls."""
    B, D, F, L = 16, 8, 12, 3

    def forward(a_LDF, b_LFD, x_BD):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w[0] @ w[1]), None), x_BD, (a_LDF, b_LFD))[0]

    specs = (P(None, None, "tensor"), P(None, "tensor", None), P("data", None))
    text = compile_(forward, specs, ((L, D, F), (L, F, D), (B, D)), mesh)
    program = audit.read(text, mesh)
    (row,) = program.collectives
    assert (row.kind, row.axes, row.count, row.dtype) == ("all-reduce", ("tensor",), L, "f32")
    assert row.payload_bytes == L * (B // 4) * D * 4 and row.bytes == row.payload_bytes  # 2(N-1)/N = 1 for N = 2
    assert program.flops == {"f32": L * 2 * 2 * (B // 4) * D * (F // 2)}
    assert not program.unknown_loops and not program.broken_permutes


def test_ring_of_permutes_counts_every_trip(mesh):
    def ring(x):
        pairs = [(i, (i + 1) % 4) for i in range(4)]
        return jax.lax.fori_loop(0, 5, lambda _, y: jnp.sin(jax.lax.ppermute(y, "data", pairs)), x)

    f = jax.shard_map(ring, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    program = audit.read(compile_(f, (P("data"),), ((32,),), mesh), mesh)
    (row,) = program.collectives
    assert (row.kind, row.axes, row.count, row.bytes) == ("collective-permute", ("data",), 5, 5 * 8 * 4)
    assert not program.broken_permutes


def test_data_dependent_loop_is_reported(mesh):
    def f(x):
        return jax.lax.while_loop(lambda y: y.sum() < 100, lambda y: y * jnp.sum(y), x)

    program = audit.read(compile_(f, (P("data"),), ((32,),), mesh), mesh)
    assert program.unknown_loops


def test_loops_in_loops_multiply_their_counts(mesh):
    def f(x):
        inner = lambda y: jax.lax.scan(lambda z, _: (z * jnp.sum(z), None), y, None, length=3)[0]
        return jax.lax.scan(lambda y, _: (inner(y), None), x, None, length=5)[0]
    assert sum(r.count for r in collectives(compile_(f, (P("data"),), ((32,),), mesh), mesh)) == 15
