"""mt.inspect of functions of other projects, compiled for eight H100 that are not here."""
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from test_functions import B, D, F, PRODUCTS, STEP, arguments, make, mesh_of, modules, on, train, update

import meshtrain as mt
from meshtrain.config import ConfigError
from meshtrain.cost.program import compile, roofline
from meshtrain.hardware import GPUS

pytestmark = pytest.mark.skipif(compile.missing_wheels(), reason="pip install -e '.[gpu-compile]'")
GPU = "h100:8"


def test_a_step_is_priced_for_absent_gpus_with_the_bytes_that_a_hand_counts():
    costs = mt.inspect(STEP, *arguments(mesh_of(dp=4, mp=2)), topology=GPU, tokens=B)
    weights = 2 * D * F * 4 // 2
    assert costs.memory_bytes["compiled"]["arguments"] == weights + B * D * 4 // 4
    assert costs["matmul_flops"]["repeated"] == 1
    sent = {}
    for row in costs.collectives["compiled"]:
        sent[tuple(row["axes"])] = sent.get(tuple(row["axes"]), 0) + row["bytes"]
    assert 0 <= sent["dp",] - weights * 2 * 3 // 4 <= 64 and sent["mp",] == 2 * B * D * 4 // 4 // 2
    line = costs.roofline
    assert line["num_gpus"] == 8 and sum(line["share"].values()) == pytest.approx(1)
    flops = sum(kernel["flops"] for kernel in line["kernels"])
    assert flops == costs["matmul_flops"]["compiled"] == 5 * PRODUCTS / 8
    assert line["mfu"] == pytest.approx(5 * PRODUCTS / line["step_time_s"] / 8 / GPUS["h100"].peak("float32"))
    assert line["tokens_per_s"] == pytest.approx(B / line["step_time_s"])
    assert all(re.fullmatch(r"cost/test_functions.py:\d+", kernel["line"]) for kernel in line["kernels"]
               if kernel["part"] == "matmul")
    assert any("TF32" in note for note in costs["notes"]) and "tokens/s a GPU" in str(costs)


def test_the_update_of_an_optax_step_is_its_optimizer():
    mesh, rule = mesh_of(dp=4, mp=2), optax.adamw(1e-3)
    weights, x = arguments(mesh)
    state = jax.tree.map(lambda leaf: on(mesh, leaf.shape) if leaf.ndim == 0 else leaf, jax.eval_shape(rule.init, weights))
    state = (state[0]._replace(mu=weights, nu=weights), *state[1:])

    @jax.jit
    def step(weights, state, x):
        grads = jax.grad(lambda weights: jnp.mean((jax.nn.relu(x @ weights["up"]) @ weights["down"]) ** 2))(weights)
        updates, state = rule.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state
    costs = mt.inspect(step, weights, state, x, topology=GPU)
    assert costs.roofline["share"]["optimizer"] > 0.03 and costs["matmul_flops"]["repeated"] == 1
    assert costs.memory_bytes["compiled"]["arguments"] == 3 * 2 * D * F * 4 // 2 + B * D * 4 // 4 + 4


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_both_kinds_of_axes_go_to_absent_gpus(kind):
    mesh = mesh_of(kind, x=8)
    costs = mt.inspect(jax.jit(lambda w, x: x @ w), on(mesh, (256, 256)), on(mesh, (256, 256), "x"), topology=GPU)
    assert costs["matmul_flops"]["repeated"] == 1 and costs["mesh"]["gpu"] == "h100"


def test_modules_of_nnx_go_to_absent_gpus():
    costs = mt.inspect(train, *modules(mesh_of(fsdp=8)), topology=GPU)
    assert costs["matmul_flops"]["repeated"] == 1 and costs.roofline["share"]["optimizer"] > 0
    assert mt.inspect(train, *modules(), topology="h100:1").roofline["num_gpus"] == 1


def constrained(mesh):
    hidden = NamedSharding(mesh, P("dp", "mp"))
    return jax.jit(lambda weights, x: update(weights, x, lambda h: jax.lax.with_sharding_constraint(h, hidden)))


def mapped(mesh):
    return jax.jit(lambda weights, x: jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))(x))


@pytest.mark.parametrize("build, where", [
    (constrained, r"gpu/test_function_programs.py:\d+"), (mapped, r"gpu/test_function_programs.py:\d+"),
    (lambda mesh: make(mesh)[0], r"(cost/test_functions.py:\d+|its in_shardings or out_shardings)"),
    (lambda mesh: jax.jit(lambda weights, x: x * 2, in_shardings=(None, NamedSharding(mesh, P("dp")))),
     "its in_shardings or out_shardings")])
def test_a_step_that_names_a_mesh_of_its_own_is_told_where_and_what_to_do(build, where):
    mesh = mesh_of(dp=4, mp=2)
    with pytest.raises(ConfigError, match=f"names a mesh of its own at {where}, .*give make.mesh. .*bare PartitionSpec"):
        mt.inspect(build(mesh), *arguments(mesh), topology=GPU)


def test_a_step_of_make_and_one_with_bare_specs_are_the_same_program():
    def bare(weights, x):
        return update(weights, x, lambda h: jax.lax.with_sharding_constraint(h, P("dp", "mp")))
    made = mt.inspect(make, mesh={"dp": 4, "mp": 2}, topology=GPU)
    named = mt.inspect(jax.jit(bare), *arguments(mesh_of(dp=4, mp=2)), topology=GPU)
    assert made["matmul_flops"]["repeated"] == named["matmul_flops"]["repeated"] == 1
    assert made.sent_bytes == named.sent_bytes and made.roofline["step_time_s"] == named.roofline["step_time_s"]


def test_a_mesh_of_other_sizes_and_a_wrong_number_of_gpus():
    args = arguments(mesh_of(dp=4, mp=2))
    costs = mt.inspect(STEP, *args, topology="h100:16", mesh={"dp": 8, "mp": 2})
    assert costs["mesh"]["links"] == {"dp": {"size": 8, "inside": 4}, "mp": {"size": 2, "inside": 2}}
    for given, said in (({"topology": "h100:16"}, 'dp 4 × mp 2 has 8 devices, and h100:16 has 16; use topology="h100:8"'),
                        ({"topology": "h1:8"}, "unknown GPU 'h1'")):
        with pytest.raises(ConfigError, match=said):
            mt.inspect(STEP, *args, **given)
    with pytest.raises(ConfigError, match="the arguments are on no mesh, so every device of h100:8 would do the same"):
        mt.inspect(jax.jit(lambda x: x @ x), jnp.ones((64, 64)), topology=GPU)


def test_options_are_none_unless_they_are_asked_for_and_the_result_says_which():
    mesh = mesh_of(x=8)

    def told(options):
        return mt.inspect(jax.jit(lambda x: x @ x.T), on(mesh, (256, 256), "x"), topology=GPU, options=options)
    assert told(None)["function"]["options"] == {} and "compiled without XLA options" in str(told(None))
    ours = told("meshtrain")
    assert ours["function"]["options"]["xla_gpu_enable_latency_hiding_scheduler"] is True
    assert any("xla_gpu_enable_latency_hiding_scheduler=True" in note for note in ours["notes"])
    assert told({"xla_gpu_autotune_level": 0})["function"]["options"] == {"xla_gpu_autotune_level": 0}


def test_attention_in_a_scope_has_its_share_and_else_counts_as_matmuls():
    def attend(q):
        return jax.grad(lambda q: (jax.nn.softmax(q @ q.T) @ q).astype(jnp.float32).sum())(q)
    q = jnp.ones((1024, 64), jnp.bfloat16)
    plain = mt.inspect(jax.jit(attend), q, topology="h100:1")
    scoped = mt.inspect(jax.jit(jax.named_scope("attention")(attend)), q, topology="h100:1")
    assert plain.roofline["share"]["attention"] == 0 and scoped.roofline["share"]["attention"] > 0.9
    assert any("attention counts as matmuls" in note for note in plain["notes"])
    assert not any("attention counts as matmuls" in note for note in scoped["notes"])


def test_sums_in_bfloat16_over_devices_are_named():
    mesh = mesh_of(x=8)
    costs = mt.inspect(jax.jit(lambda x, w: x @ w, out_shardings=P()), on(mesh, (256, 256), None, "x", dtype=jnp.bfloat16),
                       on(mesh, (256, 256), "x", dtype=jnp.bfloat16), topology=GPU)
    (row,) = costs["narrow_sums"]
    assert row["dtype"] == "bf16" and row["axes"] == ["x"]
    assert any("sums over devices in bf16 over x" in note for note in costs["notes"])


def test_devices_in_another_order_cross_hosts_where_their_ids_do():
    """dp of two hosts is their difference if the devices are in their order; interleaved, mp is."""
    devices = compile.topology("h100:16")
    in_order, interleaved = (Mesh(np.array([devices[k] for k in order]).reshape(8, 2), ("dp", "mp"))
                             for order in (range(16), [k // 2 + 8 * (k % 2) for k in range(16)]))
    assert roofline.links(GPUS["h100"], in_order) == {"dp": (8, 4), "mp": (2, 2)}
    assert roofline.links(GPUS["h100"], interleaved) == {"dp": (8, 8), "mp": (2, 1)}
