"""The MLP's kernels for Hopper: their numbers and races by jax's interpreter of GPU kernels, a layer's gradients with
them, when they are taken, and what the GPU's compiler makes of them."""
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import parity
import pytest
import sampling
import test_layouts
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernel_resources import check_mosaic

from meshtrain import config, hardware
from meshtrain.choices import mlp as choices
from meshtrain.choices.setting import Choice, Setting

from meshtrain.cost.program import compile, hlo, work
from meshtrain.kernels import mosaic_mlp
from meshtrain.kernels.activations import ACTIVATIONS, SLOPES
from meshtrain.model import mlp, params
from meshtrain.model.execution import Engines, Execution, Numerics
from meshtrain.model.fused_mlp import FusedMLP
from meshtrain.names import AXES
from meshtrain.sharding import rules
from meshtrain.sharding.rules import Layout
from meshtrain.training import accumulate
from meshtrain.training.accumulate import StepSpec

ROOT = Path(__file__).resolve().parent.parent.parent
needs_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="this jax does not interpret GPU kernels with transposed operands")
ROUNDING = 2 ** -8


def drawn(*shapes, scale=1.0):
    rng = np.random.default_rng(sum(map(sum, shapes)))
    return [jnp.asarray(scale * rng.standard_normal(shape, np.float32), jnp.bfloat16) for shape in shapes]


def wide(a):
    return np.asarray(a, np.float64)


def close(found, expected):
    """A rounding of the result, and sums of exact products in float32."""
    assert np.abs(wide(found) - wide(expected)).max() <= ROUNDING * np.abs(wide(expected)).max()


@pytest.mark.parametrize("activation", SLOPES)
def test_the_kernels_activations_are_the_models_with_their_derivatives(activation):
    gate = jnp.linspace(-12, 12, 4001)
    value, slope = SLOPES[activation](gate)
    of_gate = lambda gate: ACTIVATIONS[activation](gate, jnp.ones_like(gate))
    # float32
    np.testing.assert_allclose(value, of_gate(gate), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(slope, jax.vmap(jax.grad(of_gate))(gate), rtol=1e-5, atol=5e-6)


# rows, contracted, hidden, programs: one tile and several, more programs than tiles, more row blocks than SUPER, whose
# last group is not whole, steps that end within the ring
CASES = {"one tile, more programs": (128, 64, 256, 5), "several tiles, one program": (256, 192, 512, 1),
         "a group of row blocks and a rest": (128 * 18, 64, 256, 4)}


@needs_interpreter
@pytest.mark.parametrize("activation", ["swiglu", pytest.param("geglu", marks=sampling.GRID)])
@pytest.mark.parametrize("R, K, F, programs", CASES.values(), ids=list(CASES))
def test_products_and_activation_without_a_race(R, K, F, programs, activation):
    x, gate, up = drawn((R, K), (K, F), (K, F), scale=K ** -.25)
    *gate_up, h = mosaic_mlp.forward(x, gate, up, activation, programs, plgpu.InterpretGPUParams(detect_races=True))
    for found, w in zip(gate_up, (gate, up)):
        close(found, wide(x) @ wide(w))
    close(h, ACTIVATIONS[activation](*(y.astype(jnp.float32) for y in gate_up)))


@needs_interpreter
@pytest.mark.parametrize("activation", ["swiglu", pytest.param("geglu", marks=sampling.GRID)])
@pytest.mark.parametrize("R, K, F, programs", CASES.values(), ids=list(CASES))
def test_gradients_of_gate_and_up_without_a_race(R, K, F, programs, activation):
    dy, down_t, gate, up = drawn((R, K), (K, F), (R, F), (R, F), scale=K ** -.25)
    found = mosaic_mlp.backward(dy, down_t, gate, up, activation, programs, plgpu.InterpretGPUParams(detect_races=True))
    h, vjp = jax.vjp(ACTIVATIONS[activation], gate.astype(jnp.float32), up.astype(jnp.float32))
    for one, expected in zip(found, (*vjp(jnp.asarray(wide(dy) @ wide(down_t), jnp.float32)), h), strict=True):
        close(one, expected)


@needs_interpreter
def test_a_layer_has_the_loss_and_gradients_that_it_has_without_them():
    layout = Layout(rules.parse(""), dict.fromkeys(AXES, 1))
    cfg = config.Run(model=dict(vocab_size=256, embed_dim=64, num_layers=1, num_heads=2, mlp_dim=256)).model
    module = params.Module(lambda rngs: mlp.MLP(cfg, rngs))
    weights, (x, dy) = module.init(jax.random.key(0)), drawn((2, 64, 64), (2, 64, 64))

    def both(kernels):
        ex = Execution(layout, Numerics(jnp.dtype("bfloat16")), Engines(None, mlp=kernels))
        y, vjp = jax.vjp(lambda weights, x: module.bind(weights)(ex, x), weights, x)
        return y, *vjp(dy)
    fused, plain = both(FusedMLP("swiglu", 3, plgpu.InterpretGPUParams(detect_races=True))), both(None)
    assert jax.tree.structure(fused) == jax.tree.structure(plain)
    for found, expected in zip(jax.tree.leaves(fused), jax.tree.leaves(plain), strict=True):
        assert found.dtype == expected.dtype
        # the activation is rounded once, not after each of its operations
        np.testing.assert_allclose(wide(found), wide(expected), atol=4 * ROUNDING * np.abs(wide(expected)).max())


def plain_forward(x, w_gate, w_up, activation, *_):
    gate_up = x @ w_gate, x @ w_up
    return *gate_up, ACTIVATIONS[activation](*gate_up)


def plain_backward(dy, down_t, gate, up, activation, *_):
    h, vjp = jax.vjp(ACTIVATIONS[activation], gate, up)
    return *vjp(dy @ down_t), h


LAYOUTS = {"zero3": ("zero3", dict(fsdp=4), {}), "zero3, no remat": ("zero3", dict(fsdp=2, data=2), dict(remat="none")),
           "zero1, full remat": ("zero1", dict(fsdp=4), dict(remat="full")),
           "a ring": ("zero3", dict(context=2, fsdp=2), {}),
           "a pipeline with W apart": ("zero1", dict(stage=2, fsdp=2), {})}


@pytest.mark.parametrize("layout", ["zero3", *(pytest.param(name, marks=sampling.GRID) for name in LAYOUTS
                                               if name != "zero3")])
def test_over_devices_a_step_computes_what_one_device_computes_without_them(layout, monkeypatch):
    """With the kernels' own formulas in their place, and with residuals written in place."""
    rule, mesh, training = LAYOUTS[layout]
    run = test_layouts.run_of(rule, mesh, dict(mlp_dim=256)).replace(training=dict(remat="selective") | training)
    if "stage" in mesh:
        run = run.replace(pipeline={"schedule": "zero_bubble"})
    parity.one_device(parity.on_one_device(run).model_dump_json(), 0)       # kept: without them
    calls = []
    for name, plain in (("forward", plain_forward), ("backward", plain_backward)):
        monkeypatch.setattr(mosaic_mlp, name, lambda *args, of=plain: calls.append(of) or of(*args))
    monkeypatch.setattr(choices, "choose", lambda _: Choice(FusedMLP("swiglu", 1)))
    monkeypatch.setattr(accumulate, "StepSpec", lambda *args, **given: StepSpec(*args, **given | {"in_place": True}))
    parity.check_equal(parity.compile_run(run))
    assert {*calls} == {plain_forward, plain_backward}


def chosen(gpu="h100", mesh=None, lora=None, **model):
    run = config.Run(mesh=mesh or {}, lora=lora or {}, data=dict(seq_len=256, global_batch=8),
                     model=dict(vocab_size=256, embed_dim=64, num_layers=2, num_heads=2, mlp_dim=256, mlp="mosaic") | model)
    loaded = rules.load(str(ROOT / "sharding_rules/tensor.toml"))
    layout = Layout(loaded, dict.fromkeys(AXES, 1) | (mesh or {}))
    return choices.choose(Setting(layout, "gpu", hardware.GPUS.get(gpu), run=run)).value


@pytest.mark.parametrize("given, words", [
    (dict(gpu="a100-80gb"), "a100-80gb does not have"), (dict(gpu="b200"), "Hopper"), (dict(gpu=""), "Hopper"),
    (dict(activation="swiglu_clamped"), 'compute swiglu, geglu, not model.activation="swiglu_clamped"'),
    (dict(compute_dtype="float32"), 'not model.compute_dtype="float32"'), (dict(matmul_dtype="float8"), "float8"),
    (dict(mlp_bias=True), "no bias"), (dict(lora=dict(rank=4)), "no adapters"),
    (dict(mesh=dict(tensor=2)), "over devices"), (dict(mlp_dim=384), "model.mlp_dim=384"),
    (dict(embed_dim=96, num_heads=3), "model.embed_dim=96"), (dict(num_experts=4), "no layer has a dense MLP")])
def test_what_they_cannot_serve_is_said(given, words):
    with pytest.raises(ValueError, match=re.escape(words)) as raised:
        chosen(**given)
    assert 'use "auto" or "xla"' in str(raised.value)


def test_they_are_taken_where_they_are_asked_for():
    assert chosen() == FusedMLP("swiglu", hardware.GPUS["h100"].num_sms)
    assert chosen(gpu="h200", activation="geglu").activation == "geglu"
    assert chosen(mlp="xla", gpu="a100-80gb") is None and chosen(mlp="auto") is None, "no GPU has compared them"


def test_the_roofline_counts_products_and_the_activations_bytes():
    for name, columns, more in (("forward", 1024, 2 * 256 * 512), ("backward", 512, 8 * 256 * 512)):
        module = hlo.parse(f"""
ENTRY %main (p0: bf16[256,64], p1: bf16[64,512]) -> (bf16[256,512], bf16[256,512], bf16[256,512]) {{
  %p0 = bf16[256,64] parameter(0)
  %p1 = bf16[64,512] parameter(1)
  ROOT %r = (bf16[256,512], bf16[256,512], bf16[256,512]) custom-call(%p0, %p1, %p1), """
                           f'custom_call_target="mosaic_gpu_v2", '
                           f'metadata={{op_name="jit(f)/{mosaic_mlp.NAME}_{name}/mpmd_map"}}\n}}\n')
        ins = module.computations[module.entry]["r"]
        found = work.of(module, module.entry, ins, None)
        assert found.known and found.flops == 2 * 256 * 64 * columns
        assert found.grouped.activation_bytes == more and found.grouped.kernel == "mosaic"


@pytest.mark.skipif(compile.missing_wheels(), reason=f"pip install -e '.[gpu-compile]': no {compile.missing_wheels()}")
def test_compiled_for_hopper_they_spill_nothing(tmp_path):
    """Of Llama 3 8B."""
    code = """
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from meshtrain.cost.program import compile
from meshtrain.kernels import mosaic_mlp
from meshtrain.sharding.mesh import MeshSpec
mesh = MeshSpec({}).build(compile.topology("h100:1"))
array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=jax.NamedSharding(mesh, P()))
R, K, F = 2048, 4096, 14336
x, w, y = array(R, K), array(K, F), array(R, F)
def both(x, w, y, activation):
    return (mosaic_mlp.forward(x, w, w, activation, 132), mosaic_mlp.backward(x, w, y, y, activation, 132))
with jax.set_mesh(mesh):
    for activation in ("swiglu", "geglu"):
        jax.jit(jax.shard_map(lambda x, w, y: both(x, w, y, activation), in_specs=P(), out_specs=P(),
                              check_vma=False)).lower(x, w, y).compile()
"""
    assert len(check_mosaic(tmp_path, "-c", code)) == 4
