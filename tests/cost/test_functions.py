"""mt.inspect of functions of other projects on eight simulated devices: numbers that a hand can count, work that is
repeated in silence, and functions that cannot be compiled as they are."""
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import meshtrain as mt
from meshtrain import scopes
from meshtrain.config import ConfigError
from meshtrain.cost.program import audit, traced
from meshtrain.cost.program.sources import SourceFrame, Sources, line_of
from meshtrain.inspection import functions

D, F, B = 128, 512, 64
PRODUCTS = 2 * B * D * F        # FLOPs of one of the five products of `update`: two forward, three backward


def mesh_of(kind=AxisType.Auto, order=None, **sizes) -> Mesh:
    devices = np.array(jax.devices()[:np.prod([*sizes.values()])])
    return Mesh((devices if order is None else devices[order]).reshape(*sizes.values()), tuple(sizes),
                axis_types=(kind,) * len(sizes))


def on(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def arguments(mesh, split=True):
    """The weights split over mp, or whole; the rows over dp."""
    mp = "mp" if split else None
    return {"up": on(mesh, (D, F), None, mp), "down": on(mesh, (F, D), mp)}, on(mesh, (B, D), "dp")


def update(weights, x, constrain=lambda x: x):
    def loss(weights):
        return jnp.mean((constrain(jax.nn.relu(x @ weights["up"])) @ weights["down"]) ** 2)
    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, grads), value


STEP = jax.jit(update, donate_argnums=0)


# ---- FLOPs of a traced function --------------------------------------------------------------------------------------


def count(function, *args) -> traced.TracedFlops:
    return traced.count(jax.jit(function).trace(*args).jaxpr.jaxpr)


def test_flops_of_a_function_count_scans_by_length_and_shard_maps_by_their_manual_axes():
    x, w = jnp.ones((4, 8)), jnp.ones((8, 8))
    chain = count(lambda x: jax.lax.scan(lambda x, _: (jnp.tanh(x @ w) @ w, None), x, None, length=5)[0], x)
    assert chain.total == 5 * 2 * 2 * 4 * 8 * 8 and chain.bounds == chain.uncounted == ()
    assert [*chain.by_dtype] == ["float32"] and all(re.fullmatch(r"cost/test_functions.py:\d+", line) for line in chain.by_line)
    mesh = mesh_of(dp=4, mp=2)
    sharded = jax.shard_map(lambda x, w: jax.lax.psum(x @ w, "mp"), mesh=mesh, in_specs=(P("dp", "mp"), P("mp")),
                            out_specs=P("dp"))
    assert count(sharded, jnp.ones((8, 16)), jnp.ones((16, 4))).total == 2 * 8 * 16 * 4
    partly = jax.shard_map(lambda x, w: x @ w, mesh=mesh, in_specs=(P("dp"), P()), out_specs=P("dp"), axis_names={"dp"})
    assert count(partly, jnp.ones((8, 16)), jnp.ones((16, 4))).total == 2 * 8 * 16 * 4


def test_nested_and_scanned_shard_maps_and_conditionals_of_known_share_count_what_a_hand_counts():
    mesh, x, w = mesh_of(dp=4, mp=2), jnp.ones((B, D)), jnp.ones((D, F))

    def over(axis, f):
        return lambda x, w: jax.shard_map(f, in_specs=(P(axis), P()), out_specs=P(axis), axis_names={axis},
                                          check_vma=False)(x, w)
    with jax.set_mesh(mesh):
        # rows are divided over dp and then over mp
        assert traced.count(jax.make_jaxpr(over("dp", over("mp", jnp.matmul)))(x, w).jaxpr).total == PRODUCTS
        # in each of 3 iterations a device of dp computes its rows, forward and twice backward
        def scanned(x, w):
            return jax.lax.scan(lambda total, i: (total + over("dp", jnp.matmul)(i * x, w).sum(), None), 0.0, jnp.ones(3))[0]
        found = traced.count(jax.make_jaxpr(jax.grad(scanned, (0, 1)))(x, w).jaxpr)
        assert (found.total, found.bounds) == (3 * 3 * PRODUCTS, ())
        # a gradient inside: each device computes it for its rows
        inside = over("dp", lambda x, w: jax.value_and_grad(lambda x: (x @ w).sum())(x)[1])
        assert traced.count(jax.make_jaxpr(inside)(x, w).jaxpr).total == 2 * PRODUCTS

    def sometimes(x, w):
        def body(total, i):
            with jax.named_scope(scopes.TAKEN.write(2, 5)):
                return jax.lax.cond(i < 2, lambda: total + (x @ w).sum(), lambda: total), None
        return jax.lax.scan(body, 0.0, jnp.arange(5))[0]
    found = traced.count(jax.make_jaxpr(sometimes)(x, w).jaxpr)
    assert (found.total, found.bounds) == (2 * PRODUCTS, ())


def test_loops_of_unknown_length_and_conditionals_make_the_flops_a_bound_that_says_so():
    w = jnp.ones((8, 8))
    loop = count(lambda x: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ w, x), jnp.ones((4, 8)))
    assert loop.total == 2 * 4 * 8 * 8 and loop.bounds[0].startswith("a loop of unknown length with matmuls (cost/test_")
    branch = count(lambda x: jax.lax.cond(x.sum() > 0, lambda x: x @ w @ w, lambda x: x @ w, x), jnp.ones((4, 8)))
    assert branch.total == 2 * 2 * 4 * 8 * 8 and branch.bounds[0].startswith("a conditional with matmuls (cost/test_")
    assert count(lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x) @ w, jnp.ones((4, 8))).bounds == ()
    image = count(lambda x: jax.lax.conv(x, jnp.ones((2, 3, 3, 3)), (1, 1), "SAME"), jnp.ones((1, 3, 8, 8)))
    assert image.total == 0 and image.uncounted[0].startswith("convolutions (cost/test_functions.py:")


# ---- programs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [None, [0, 2, 4, 6, 1, 3, 5, 7]])
def test_a_step_on_a_mesh_of_its_own_costs_what_a_hand_counts(order):
    costs = mt.inspect(STEP, *arguments(mesh_of(order=order, dp=4, mp=2)), tokens=B)
    assert costs["mesh"]["sizes"] == {"dp": 4, "mp": 2}
    weights = 2 * D * F * 4 // 2
    assert costs.memory_bytes["compiled"]["arguments"] == weights + B * D * 4 // 4
    assert costs["matmul_flops"]["traced"] == 5 * PRODUCTS
    assert costs["matmul_flops"]["compiled"] == 5 * PRODUCTS / 8 and costs["matmul_flops"]["repeated"] == 1
    sent = {tuple(row["axes"]): row for row in costs.collectives["compiled"]}
    # over dp the gradients and the loss, over mp the activations
    assert 0 <= sent["dp",]["bytes"] - weights * 2 * 3 // 4 <= 64
    assert sent["mp",]["bytes"] == 2 * B * D * 4 // 4 // 2
    assert all(re.fullmatch(r"cost/test_functions.py:\d+", row["line"]) for row in sent.values())
    rows = {row["name"]: (row["copies"], row["whole_on"], row["donated"]) for row in costs["arguments"]}
    assert rows == {"weights/up": (4, ["dp"], True), "weights/down": (4, ["dp"], True), "x": (2, ["mp"], False)}
    assert costs["warnings"] == [] and costs["function"] == {"name": "update", "options": {}, "tokens": B}
    assert json.loads(costs.json) == costs and costs.roofline is None


def test_work_that_a_mesh_axis_repeats_is_told_with_the_axis_and_the_line():
    costs = mt.inspect(STEP, *arguments(mesh_of(dp=4, mp=2), split=False))
    assert costs["matmul_flops"]["repeated"] == 2
    assert {(row["times"], str(row["axes"])) for row in costs["matmul_flops"]["repeats"]} == {(2, "[['mp']]")}
    assert re.search(r"compute the matmuls of cost/test_functions.py:\d+ 2 times: mp does not split them",
                     costs["warnings"][0])
    assert costs["warnings"][0] in str(costs) and costs["arguments"][0]["copies"] == 8


@pytest.mark.parametrize("times, split, axes", [
    (2, {"dp"}, [("mp",)]), (4, set(), [("dp",)]), (8, set(), [("dp", "mp")]), (3, set(), []), (1.5, set(), [])])
def test_the_axes_of_repeated_work_multiply_to_it(times, split, axes):
    assert list(functions.explain_repeats(times, {"dp": 4, "one": 1, "mp": 2}, split)) == axes


def test_of_two_axes_of_one_size_the_one_that_splits_no_argument_repeats_the_work():
    assert functions.explain_repeats(2, {"a": 2, "b": 2}, {"a"}) == (("b",),)
    assert functions.explain_repeats(2, {"a": 2, "b": 2}, {"a", "b"}) == (("a",), ("b",))


class Net(nnx.Module):
    def __init__(self, split):
        def init(*axes):
            plain = nnx.initializers.lecun_normal()
            return nnx.with_partitioning(plain, axes) if split else plain
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(D, F, kernel_init=init("fsdp", None), rngs=rngs)
        self.down = nnx.Linear(F, D, kernel_init=init(None, "fsdp"), rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


@nnx.jit
def train(model, optimizer, x):
    value, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
    optimizer.update(model, grads)
    return value


def modules(mesh=None) -> tuple:
    """A model, its optimizer and a batch: on one device, or split over a mesh."""
    if mesh is None:
        model = Net(False)
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param), jnp.ones((B, D))
    with jax.set_mesh(mesh):
        model = Net(True)
        optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    return model, optimizer, jax.device_put(jnp.ones((B, D)), NamedSharding(mesh, P("fsdp")))


def test_modules_of_nnx_are_inspected_on_one_device_and_split():
    alone = mt.inspect(train, *modules())
    assert alone["mesh"]["sizes"] == {"device": 1} and alone.collectives["compiled"] == []
    assert alone["matmul_flops"]["traced"] == alone["matmul_flops"]["compiled"] == 5 * PRODUCTS
    split = mt.inspect(train, *modules(mesh_of(fsdp=8)))
    assert split["matmul_flops"]["repeated"] == 1 and set(split.sent_bytes) >= {"all-gather", "all-reduce"}
    copies = {row["name"]: row["copies"] for row in split["arguments"]}
    assert copies["model/up/kernel/value"] == copies["optimizer/opt_state/0/mu/up/kernel/value"] == 1
    assert copies["model/up/bias/value"] == 8


def test_explicit_axes_keep_their_kind():
    mesh = mesh_of(AxisType.Explicit, x=8)
    costs = mt.inspect(jax.jit(lambda w, x: jnp.sum(x @ w)), on(mesh, (64, 64)), on(mesh, (32, 64), "x"))
    assert costs["matmul_flops"]["repeated"] == 1 and costs.collectives["compiled"][0]["axes"] == ["x"]


def make(mesh):
    """A step that closes over its mesh, as large trainers build theirs."""
    hidden = NamedSharding(mesh, P("dp", "mp"))
    args = arguments(mesh)
    placed = jax.tree.map(lambda leaf: leaf.sharding, args[0]), NamedSharding(mesh, P())
    return jax.jit(lambda weights, x: update(weights, x, lambda h: jax.lax.with_sharding_constraint(h, hidden)),
                   out_shardings=placed), args


def test_a_function_that_closes_over_its_mesh_is_made_for_a_mesh_of_any_size():
    for sizes in ({"dp": 4, "mp": 2}, {"dp": 2, "mp": 2}):
        costs = mt.inspect(make, mesh=sizes)
        assert costs["mesh"]["sizes"] == sizes and costs["matmul_flops"]["repeated"] == 1


def test_arguments_go_to_the_mesh_that_is_given_with_their_specs():
    args = arguments(mesh_of(dp=4, mp=2))
    costs = mt.inspect(STEP, *args, mesh={"dp": 2, "mp": 4})
    assert costs.memory_bytes["compiled"]["arguments"] == 2 * D * F * 4 // 4 + B * D * 4 // 2
    whole = mt.inspect(jax.jit(lambda x: x @ x), jnp.ones((64, 64)), mesh={"dp": 8})
    assert whole["matmul_flops"]["repeated"] == 8 and whole["arguments"][0]["whole_on"] == ["dp"]


def test_what_the_program_does_not_use_and_what_makes_its_flops_a_bound_is_noted():
    w = jnp.ones((64, 64))
    costs = mt.inspect(jax.jit(lambda x, unused: jax.lax.cond(x.sum() > 0, lambda x: x @ w, lambda x: x, x)),
                       jnp.ones((64, 64)), jnp.ones(3))
    assert costs["arguments"][1]["copies"] is None and "the program does not use unused" in costs["notes"]
    assert costs["matmul_flops"]["bounds"] and "about 524.3 kFLOP" in str(costs)
    assert any("the function's FLOPs are only a bound" in note for note in costs["notes"])


def test_a_page_shows_a_function_and_is_not_overwritten(tmp_path):
    costs = mt.inspect(STEP, *arguments(mesh_of(dp=4, mp=2), split=False))
    costs.write_page(tmp_path / "cost.html")
    page = (tmp_path / "cost.html").read_text(encoding="utf-8")
    for words in ("what a function costs", "update", "dp", "2.00 times", "weights/up", "does not split them"):
        assert words in page
    assert not re.search(r"\bnan\b|None", page.split('<script type="application/json"')[0])
    assert costs._repr_svg_().startswith("<svg") and "temporaries" in costs._repr_svg_()
    with pytest.raises(ConfigError, match="is there already"):
        costs.write_page(tmp_path / "cost.html")


@pytest.mark.parametrize("asked, said", [
    (lambda args: mt.inspect(update, *args), "wrap a plain function: jax.jit.f."),
    (lambda args: mt.inspect(lambda mesh: 3, mesh={"dp": 2}), r"<lambda> returned 3; make.mesh. must return .jitted, args."),
    (lambda args: mt.inspect(STEP, *args, mesh=3), "mesh=3 is not a mesh"),
    (lambda args: mt.inspect(STEP, *args, mesh={"dp": 0}), "is not a mesh; give sizes of axes"),
    (lambda args: mt.inspect(STEP, *args, mesh={"data": 8}), "split over mp, and the mesh has the axes data"),
    (lambda args: mt.inspect(STEP, *args, mesh={"dp": 16}), "dp 16 has 16 devices, and this process has 8"),
    (lambda args: mt.inspect(STEP, *args, options="mine"), 'options="mine" is unknown'),
    (lambda args: mt.inspect(STEP, *args, assume={"matml.best": 1}), "^assume matml.best=1: no assumption"),
    (lambda args: mt.inspect(STEP, *args, assume={"matmul.best": "1"}), "assume=.* is no dict of numbers"),
    (lambda args: mt.inspect(STEP, *args, options=["a"]), "options=.'a'. is no dict; give XLA options"),
    (lambda args: mt.inspect(STEP, *args, tokens=-5), "tokens=-5 is not a whole number of at least 0"),
    (lambda args: mt.inspect(STEP, *args, mesh={1: 8}), "mesh={1: 8} is not a mesh"),
    (lambda args: mt.inspect(STEP, *args, topology=8), "topology=8 is not a string"),
    (lambda args: mt.inspect(STEP, args[0], on(mesh_of(x=8), (B, D), "x")), "on 2 meshes, dp 4 × mp 2, x 8"),
    (lambda args: mt.inspect(mt.Experiment(), tokens=3), "are for a function of jax.jit"),
])
def test_what_cannot_be_inspected_is_one_message(asked, said):
    with pytest.raises(ConfigError, match=said) as told:
        asked(arguments(mesh_of(dp=4, mp=2)))
    assert not re.search(r"--[a-z]", str(told.value))


# ---- sources ---------------------------------------------------------------------------------------------------------

SITE = "/opt/env/lib/python3.11/site-packages"


@pytest.mark.parametrize("files, line", [
    ([f"{SITE}/jax/_src/lax.py", f"{SITE}/flax/nnx/linear.py", "/home/me/model/net.py", "/home/me/train.py"], "model/net.py:3"),
    ([f"{SITE}/meshtrain/parallel/ring.py", "/home/me/train.py"], "parallel/ring.py:1"),
    ([f"{SITE}/jax/_src/lax.py", f"{SITE}/flax/nnx/linear.py"], "nnx/linear.py:2"),
    (["/usr/lib/python3.11/functools.py", "/home/me/train.py"], "me/train.py:2"), ([], ""),
    ([f"{SITE}/jax/_src/lax.py", f"{SITE}/maxtext/layers/attentions.py", f"{SITE}/jax/_src/api.py",
      "/home/me/meshtrain/inspection/functions.py", "/home/me/price.py"], "layers/attentions.py:2")])
def test_the_line_of_an_operation_is_the_innermost_outside_installed_packages(files, line):
    assert line_of(SourceFrame(file, number) for number, file in enumerate(files, 1)) == line


def test_operations_of_optax_are_the_optimizer_and_its_losses_are_not():
    module = audit.hlo.parse("ENTRY %m (x: f32[2]) -> f32[2] {\n  ROOT %x = f32[2] parameter(0), "
                             "metadata={op_name=\"jit(f)/mul\" source_file=\"F\" source_line=1}\n}\n")
    (ins,) = module.computations["m"].values()
    for file, part in (("optax/_src/transform.py", "optimizer"), ("optax/losses/_classification.py", ""), ("a/b.py", "")):
        named = audit.hlo.Instruction(ins.name, ins.type_text, ins.op, ins.args, ins.attrs.replace('"F"', f'"{SITE}/{file}"'),
                                      True)
        assert Sources({}).part(named) == part


def test_a_lambda_leaves_no_name_in_a_short_path():
    assert audit.short_source("jit(<lambda>)/jvp()/dot_general") == "dot_general"
