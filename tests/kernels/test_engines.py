"""Which engine attention runs in, and where its kernels stand in the GPU's program: once a layer, on a device's own
heads."""
import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import plain_attention
import pytest
import sampling
from gpu_programs import kernels, needs_compiler
from jax.sharding import PartitionSpec as P
from test_context import laid_out

from meshtrain import assembly, config, hardware
from meshtrain.choices import attention as choices
from meshtrain.choices.setting import Setting
from meshtrain.cost.formulas.assumptions import Assumptions
from meshtrain.cost.formulas import attention_pairs
from meshtrain.cost.program import compile
from meshtrain.inspection import report
from meshtrain.kernels import blockwise, mosaic, pallas, tiles
from meshtrain.kernels.engine import Scores
from meshtrain.parallel.context import attention
from meshtrain.sharding import rules

slow = partial(pytest.param, marks=sampling.GRID)


# ---- the choice ------------------------------------------------------------------------------------------------------

SPLIT_ALIKE = rules.parse('[activations]\nheads = "tensor"\nkv_heads = "tensor"\n')
HEADS_ALONE = rules.parse('[activations]\nheads = "tensor"\n')


def asked_for(model={}, data={}, training={}, table=SPLIT_ALIKE, sizes={}):
    """(run, layout)."""
    run = config.Run(model=dict(embed_dim=512, num_heads=4, num_kv_heads=2, head_dim=128) | model,
                     data=data, training=training)
    return run, rules.Layout(table, {axis: 1 for axis in ("data", "fsdp", "tensor", "stage", "context")} | sizes)


def chosen(model={}, data={}, training={}, platform="gpu", gpu="h100", table=SPLIT_ALIKE, sizes={}) -> tuple[str, str]:
    """(name of the engine, note)."""
    run, layout = asked_for(model, data, training, table, sizes)
    choice = choices.choose(Setting(layout, platform, hardware.GPUS.get(gpu), run=run))
    made_in = choice.value.engine_of(run.model.head_dim, attention.value_dim(run.model), Scores()).forward
    return getattr(made_in, "func", made_in).__module__.rpartition(".")[2], "\n".join(choice.why)


WHOLE = dict(document_mask=False)


@pytest.fixture
def with_cudnn(monkeypatch):
    """And with a jax in which no GPU has compared Mosaic's kernels, wherever a plan is made."""
    monkeypatch.setattr(choices, "_has_cudnn", lambda: True)
    monkeypatch.setattr(choices, "AUTO", [name for name in choices.AUTO if name != "mosaic"])


@pytest.mark.parametrize("expected, asked", [
    ("pallas", {}), ("pallas", dict(gpu="a100-80gb")), ("pallas", dict(model=dict(head_dim=256))),
    ("cudnn", dict(data=WHOLE)),
    ("pallas", dict(data=WHOLE, training=dict(deterministic=True))),
    ("pallas", dict(data=WHOLE, model=dict(head_dim=256))),
    ("blockwise", dict(model=dict(head_dim=320))), ("blockwise", dict(gpu="")), ("blockwise", dict(gpu="mi300x")),
    ("blockwise", dict(model=dict(compute_dtype="float32"))), ("blockwise", dict(platform="cpu", gpu="cpu")),
    ("blockwise", dict(data=WHOLE, model=dict(attention="blockwise"))),
    ("pallas", dict(data=WHOLE, model=dict(attention="pallas"))),
    ("mosaic", dict(model=dict(attention="mosaic"))), ("mosaic", dict(model=dict(attention="mosaic"), gpu="h200")),
    ("blockwise", dict(table=HEADS_ALONE, sizes=dict(tensor=2))), ("pallas", dict(table=HEADS_ALONE)),
    ("pallas", dict(table=HEADS_ALONE, sizes=dict(tensor=2), model=dict(num_kv_heads=1))),
    ("pallas", dict(model=dict(window=64))), ("cudnn", dict(data=WHOLE, model=dict(window=64))),
    ("pallas", dict(data=WHOLE, model=dict(window=64), sizes=dict(context=2))),
    ("cudnn", dict(data=WHOLE, sizes=dict(context=2))),
    ("blockwise", dict(data=WHOLE, gpu="mi300x")),
    ("pallas", dict(data=WHOLE, model=dict(score_softcap=50.0))),
    ("pallas", dict(model=dict(window=64, score_softcap=50.0, mixers="WF"))),
    # the widest head of any layer decides
    ("pallas", dict(data=WHOLE, model=dict(window=64, mixers="WF", kinds=dict(F=dict(head_dim=256))))),
    ("blockwise", dict(model=dict(window=64, mixers="WF", kinds=dict(F=dict(head_dim=512))))),
    ("pallas", dict(model=dict(mixers="G*", kinds=dict(F=dict(head_dim=512))))),
    ("pallas", dict(data=WHOLE, model=dict(head_dim=96, latent=dict(kv_dim=64, rope_dim=32, value_dim=64)))),
    ("cudnn", dict(data=WHOLE, model=dict(head_dim=96, latent=dict(kv_dim=64, rope_dim=32)))),
])
def test_packed_rows_take_pallas_whole_rows_cudnn_and_others_blocks(expected, asked, with_cudnn):
    """And the price is that engine's, whatever is installed where a plan is made."""
    assert chosen(**asked)[0] == expected
    platform, gpu = asked.get("platform", "gpu"), asked.get("gpu", "h100")
    if platform == "gpu" and gpu:
        run, layout = asked_for(**{key: value for key, value in asked.items() if key != "gpu"})
        priced = attention_pairs.count(run, layout, Assumptions(gpu))
        assert priced.engine == expected
        assert priced.documents == (run.data.document_mask and expected in attention_pairs.OURS)


@pytest.mark.parametrize("expected, asked", [
    ("mosaic", {}), ("mosaic", dict(gpu="h200")), ("pallas", dict(gpu="a100-80gb")), ("pallas", dict(gpu="b200")),
    ("pallas", dict(model=dict(head_dim=256))), ("cudnn", dict(data=WHOLE)),
    ("mosaic", dict(data=WHOLE, training=dict(deterministic=True))),
    ("mosaic", dict(data=WHOLE, model=dict(score_softcap=50.0))), ("mosaic", dict(model=dict(window=64))),
    ("mosaic", dict(model=dict(head_dim=192, latent=dict(kv_dim=64, rope_dim=64, value_dim=128)))),
    ("mosaic", dict(model=dict(window=64, mixers="WF", kinds=dict(F=dict(head_dim=256))))),
    ("blockwise", dict(model=dict(compute_dtype="float32"))), ("pallas", dict(model=dict(attention="pallas")))])
def test_on_hopper_packed_rows_take_mosaic_where_a_gpu_has_compared_it(expected, asked, monkeypatch):
    """And are priced by it where an older jax makes the plan."""
    monkeypatch.setattr(choices, "_has_cudnn", lambda: True)
    monkeypatch.setattr(mosaic, "AUTO_SINCE", (0, 0))
    assert chosen(**asked)[0] == expected
    run, layout = asked_for(**{key: value for key, value in asked.items() if key != "gpu"})
    monkeypatch.setattr(mosaic, "AUTO_SINCE", (9, 9))
    assert attention_pairs.count(run, layout, Assumptions(asked.get("gpu", "h100"))).engine == expected
    assert chosen(**asked)[0] == (expected if asked.get("data") == WHOLE and not asked.get("training") and not asked.get(
        "model") else expected.replace("mosaic", "pallas"))


def test_the_choice_is_said_in_one_line_with_its_reason(with_cudnn, monkeypatch):
    assert chosen(data=WHOLE)[1] == "attention: cuDNN's kernel"
    assert chosen()[1] == ("attention: Pallas kernels that skip blocks outside documents, because cuDNN's kernel has "
                           "no document mask (data.document_mask=true)")
    assert "training.deterministic=true" in chosen(data=WHOLE, training=dict(deterministic=True))[1]
    assert chosen(platform="cpu")[1] == ""
    assert chosen(platform="cpu", model=dict(attention="blockwise"))[1].endswith("because model.attention=blockwise")
    windowed = chosen(data=WHOLE, model=dict(window=64, mixers="WWWWWF", num_layers=6), sizes=dict(context=2))[1]
    assert windowed.startswith("attention: Pallas kernels that skip blocks outside documents, window 64 in 5 of 6 "
                               "layers, because")
    assert 'no window over the chunks of context.method="ring" (model.window=64)' in windowed
    assert chosen(platform="cpu", model=dict(window=64))[1] == "attention: blockwise XLA engine, window 64"
    assert chosen(platform="cpu", model=dict(window=256))[1] == ""          # of sequences of 256
    note = chosen(model=dict(compute_dtype="float32"))[1]
    assert "blockwise XLA engine, because" in note and note.count("model.compute_dtype=float32") == 1
    assert "\n" not in note
    assert "not in the table of GPUs" in chosen(gpu="")[1]


@pytest.mark.parametrize("asked, said", [
    (dict(model=dict(attention="cudnn")), 'cudnn" cannot serve this run: cuDNN\'s kernel has no document mask'),
    (dict(model=dict(attention="pallas"), platform="cpu"), "kernels run on GPUs, not on platform 'cpu'"),
    (dict(model=dict(attention="mosaic"), platform="cpu"), "kernels run on GPUs, not on platform 'cpu'"),
    *((dict(model=dict(attention="mosaic"), gpu=gpu), f"need Hopper's wgmma (h100, h200, gh200), which {gpu} does not")
      for gpu in ("a100-80gb", "b200")),
    (dict(model=dict(attention="mosaic", head_dim=256)),
     "keys and values of a width of at most 64 and 64 or 128 and 128 or 192 and 128, not 256 and 256"),
    (dict(model=dict(attention="pallas", head_dim=512)), "heads of a width of at most 256, not 512"),
    (dict(model=dict(attention="pallas"), table=HEADS_ALONE, sizes=dict(tensor=2)),
     "splits heads over ['tensor'] and kv_heads over []"),
])
def test_an_engine_that_cannot_serve_the_run_is_refused_with_those_that_can(asked, said, with_cudnn):
    with pytest.raises(ValueError, match=re.escape(said)) as refusal:
        chosen(**asked)
    assert '; use "auto" or ' in str(refusal.value)


def test_a_forced_engine_that_cannot_is_the_users_mistake():
    run = config.Run(model=dict(attention="pallas"), data=dict(global_batch=2))
    with pytest.raises(config.ConfigError, match='model.attention="pallas" cannot serve this run: kernels run on GPUs'):
        assembly.assemble(run, jax.devices()[:1])


def test_key_heads_that_lie_otherwise_than_query_heads_are_refused_where_sequences_are_split():
    """Each device would take its own query heads to the first key heads: wrong numbers without a word."""
    table = rules.parse('[activations]\nheads = "tensor"\nseq = "context"\nresidual_seq = "context"\n')
    layout = rules.Layout(table, {axis: 1 for axis in ("data", "fsdp", "stage")} | dict(tensor=2, context=2))
    run = config.Run(model=dict(num_heads=4, num_kv_heads=2), data=dict(seq_len=64))
    (fault,) = choices.problems(run, layout)
    assert "heads = ['tensor'] and kv_heads = []" in fault
    assert choices.problems(run.replace(model={"num_kv_heads": 1}), layout) == []


def test_a_run_chooses_an_engine_for_each_width_and_score():
    asked, array = [], lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    attend = attention.RunAttention(lambda *of: asked.append(of) or blockwise.engine(8, of[2]))
    for H, V, scores in ((24, 12, Scores()), (8, 8, Scores(0.5))):
        tokens = [array(1, 16, 2, width) for width in (H, H, V)]
        jax.eval_shape(partial(attend, None, scores=scores), *tokens, array(1, 16))
    assert asked == [(24, 12, Scores()), (8, 8, Scores(0.5))]


T, N, K, H = 512, 8, 4, 64


@needs_compiler
@pytest.mark.parametrize("nested", [True, False])
def test_in_a_region_that_is_manual_over_stage_kernels_have_own_heads_only_where_nested(nested):
    """What a pipeline does, in small. False: the fault that nesting mends, a program in which every tensor rank
    computes all heads."""
    mesh, layout = laid_out(dict(stage=2, tensor=2), "zero3", compile.topology("h100:4"))
    kernel = pallas.engine(tiles.of(H, "h100"))
    kernel = kernel if nested else kernel._replace(partitions=True)
    attend = partial(plain_attention.by_engine, kernel, None, layout)

    def body(*args):
        pin = lambda x, axis: layout.act(x, "batch", "seq", axis, "head_dim")
        q, k, v, segments = args
        return attend(pin(q, "heads"), pin(k, "kv_heads"), pin(v, "kv_heads"), segments)

    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, P("stage")))
    args = [array(jnp.bfloat16, 2, T, heads, H) for heads in (N, K, K)] + [array(jnp.int32, 2, T)]
    with jax.set_mesh(mesh):
        step = jax.jit(jax.shard_map(body, axis_names={"stage"}, in_specs=P("stage"),
                                     out_specs=P("stage"), check_vma=False))
        text = step.lower(*args).compile().as_text()
    assert kernels(text) == {("forward_causal", (1, T, N // 2 if nested else N, H)): 1}


def test_inspect_tells_kernels_of_attention_from_kernels_that_nobody_counts():
    calls = ["pallas_call.3 (__gpu$xla.gpu.triton) attention/meshtrain_attention_dq/pallas_call",
             "fusion (__cudnn$fmhaSoftmax)", "x (cutlass) y"]
    line = lambda *uncounted: report.matmuls(SimpleNamespace(flops={"bf16": 5}, uncounted=uncounted))
    assert line() == "matmul FLOPs per device and step: bf16 5"
    assert line(*calls[:2]) == line() + "; plus attention kernels"
    assert line(*calls) == line(*calls[:2]) + "; not counted: x (cutlass) y" and line(calls[2]).endswith(
        "5; not counted: x (cutlass) y")
