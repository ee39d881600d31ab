"""cuDNN's kernels as the engine of the ring, lowered for a GPU that is not there: which kernels, and on what blocks.

Nothing is executed; a GPU run must compare the numbers.
"""
from functools import partial

import jax
import jax.numpy as jnp
import plain_attention
import pytest
from jax.sharding import PartitionSpec as P

from meshtrain import assembly, config, jax_private
from meshtrain.cost.program import compile
from meshtrain.kernels import cudnn
from meshtrain.kernels.engine import Mask
from meshtrain.choices import attention as attention_choice
from meshtrain.parallel.context import attention
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.sharding.rules import Layout, parse

RULES = parse("""
[activations]
batch = "data"
seq = "context"
residual_seq = "context"
heads = "tensor"
kv_heads = "tensor"
""")
SIZES = dict(data=2, context=2, tensor=2)
B, T, N, K, H = 4, 1024, 8, 4, 64


def lowered(method: str, window: int = 0) -> str:
    mesh_spec = MeshSpec(SIZES)
    layout, mesh = Layout(RULES, mesh_spec.sizes), mesh_spec.build(jax.devices())
    attend = partial(plain_attention.by_engine, cudnn.engine(), attention.METHODS[method], layout,
                     mask=Mask(window=window, documents=False))

    def both(q, k, v, segments, do):
        o, back = jax.vjp(lambda q, k, v: attend(q, k, v, segments), q, k, v)
        return o, back(do)

    def array(heads):
        sharding = jax.sharding.NamedSharding(mesh, P("data", "context", "tensor"))
        return jax.ShapeDtypeStruct((B, T, heads, H), jnp.bfloat16, sharding=sharding)

    segments = jax.ShapeDtypeStruct((B, T), jnp.int32, sharding=jax.sharding.NamedSharding(mesh, P("data", "context")))
    with jax.set_mesh(mesh):
        traced = jax.jit(both).trace(array(N), array(K), array(K), segments, array(N))
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.skipif(jax_private.cudnn_attention() is None, reason="this jax does not offer cuDNN's blocks")
@pytest.mark.parametrize("method, forward, backward", [
    ("ring", 3, 3),         # at context 2: the diagonal and two blocks of the other device's keys
    ("gather", 3, 3),       # two diagonals and a loop
    ("ulysses", 1, 1),
])
def test_methods_call_cudnn_for_their_blocks_alone(method, forward, backward):
    text = lowered(method)
    assert text.count("custom_call @__cudnn$fmhaSoftmax(") == forward
    assert text.count("custom_call @__cudnn$fmhaSoftmaxBackward(") == backward
    assert "dot_general" not in text        # no scores beside the kernel's


@pytest.mark.skipif(jax_private.cudnn_attention() is None, reason="this jax does not offer cuDNN's blocks")
def test_cudnns_kernels_are_told_the_window():
    for window, told in ((100, 100), (0, 0), (T, 0)):      # one that reaches over all tokens is none
        text = lowered("ulysses", window)
        assert text.count(f'sliding_window_length\\22: {told}') == 2, (window, text[:3000])


def test_a_missing_private_api_is_told_and_not_an_error(monkeypatch):
    from jax._src.cudnn import fused_attention_stablehlo as fused
    monkeypatch.delattr(fused, "_dot_product_attention_bwd_p_wrapper")
    assert jax_private.cudnn_attention() is None and cudnn.engine() is None


@pytest.mark.skipif(jax_private.cudnn_attention() is None, reason="this jax does not offer cuDNN's blocks")
@pytest.mark.skipif(compile.missing_wheels(), reason=f"pip install -e '.[gpu-compile]': no {compile.missing_wheels()}")
def test_under_selective_remat_a_layer_calls_cudnns_forward_once(monkeypatch):
    """Its o and lse are kept: the backward's scan over the layers has no forward kernel of its own."""
    monkeypatch.setattr(attention_choice, "_has_cudnn", lambda: True)
    run = config.Run(mesh=dict(fsdp=2), sharding=dict(rules="sharding_rules/zero3.toml"),
                     training=dict(remat="selective"),
                     model=dict(embed_dim=128, num_layers=2, num_heads=2, head_dim=64, mlp_dim=128),
                     data=dict(document_mask=False))
    made = assembly.assemble(run, compile.topology("h100:2"))
    assert "attention: cuDNN's kernel" in made.notes
    with jax.set_mesh(made.mesh):
        text = made.program.train.lower(made.program.step.state.abstract, made.program.step.batch).as_text()
    assert text.count("custom_call @__cudnn$fmhaSoftmax(") == text.count("custom_call "
                                                                         "@__cudnn$fmhaSoftmaxBackward(") == 1
