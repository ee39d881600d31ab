"""QK-Clip: a step scales the query and key weights of heads whose scores exceed the limit by what a plain computation
says, on every layout, and changes nothing else."""
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import parity
import pytest
import sampling

from meshtrain import config
from meshtrain.run import trees
from meshtrain.training.state import State

T, LIMIT = 16, 2.9
BASE = dict(vocab_size=259, embed_dim=16, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=24,
            compute_dtype="float32", norm_eps=1e-2)
MODELS = {
    # Three layers of two kinds, with windows, sinks and biases; W has more heads than F.
    "heads": BASE | dict(mixers="FW", window=5, attention_sinks=True, attention_bias="qkv",
                         kinds=dict(W=dict(num_heads=8, num_kv_heads=4))),
    "tied": BASE | dict(tie_values=True),
    # Latents with and without rope beside a recurrence.
    "latents": BASE | dict(mixers="NGF", num_kv_heads=4, head_dim=14,
                           latent=dict(kv_dim=12, query_dim=10, rope_dim=6, value_dim=10),
                           linear=dict(key_heads=2, value_heads=4, key_dim=8, value_dim=6)),
}


def run_of(model, mesh=None, limit=LIMIT, **sections):
    """Updates are tiny: what a step changes is what it clips."""
    return config.Run(mesh=mesh or {}, sharding=dict(rules=str(parity.RULES / ("zero3" if mesh else "ddp")) + ".toml"),
                      model=MODELS[model], data=dict(seq_len=T, global_batch=8),
                      training=dict(steps=9, loss_chunk=24) | sections.pop("training", {}),
                      optimizer=dict(learning_rate=1e-7, schedule="constant", weight_decay=0.0, qk_clip=limit)
                      | sections.pop("optimizer", {}), **sections)


def stepped(run):
    """(parameters before and after a step, metrics)."""
    assert config.problems(run) == []
    case = parity.compile_run(run)
    spec, params = case.made.program.step.state, parity.draw_parameters(case.made, 0)
    opt_state = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), spec.abstract.opt_state)
    state, metrics = case.step(jax.device_put(State(np.int32(0), params, opt_state), spec.sharding),
                               case.made.program.place(parity.batch_of(run, 0)))
    return params, jax.device_get(state.params), jax.device_get(metrics)


def plain_bounds(run, params):
    """[layers with attention, N]: the largest log-sum-exp of a real token's scores, never below 0."""
    made, found = parity.assemble(run), []
    ex = made.program.step.ex

    def attend(layout, q, k, v, segments, mask, scores, sinks_N=None, expansion=None, bounded=False):
        o, _ = ex.engines.attention(layout, q, k, v, segments, mask=mask, scores=scores, sinks_N=sinks_N, expansion=expansion)
        if expansion:
            shared = jnp.broadcast_to(v[:, :, None], (*q.shape[:3], v.shape[-1]))
            k = jnp.concatenate([jnp.einsum("bsc,cnh->bsnh", k, expansion.key_CNH), shared], -1)
        k = jnp.repeat(k, q.shape[2] // k.shape[2], 2)
        s = jnp.einsum("btnh,bsnh->bnts", q, k) * scores.scale_for(q.shape[-1])
        near = np.arange(T)[:, None] - np.arange(T)
        seen = (near >= 0) & (near < (mask.window or T)) & (segments[:, :, None] == segments[:, None])[:, None]
        lse = jax.scipy.special.logsumexp(jnp.where(seen, s, -jnp.inf), -1)
        found.append(np.maximum(np.where(segments[:, None] > 0, lse, 0), 0).max((0, 2)))
        return o, None
    batch = {name: jnp.asarray(a) for name, a in parity.batch_of(run, 0).items()}
    with jax.disable_jit(), jax.default_matmul_precision("highest"), jax.set_mesh(made.mesh):
        engines = dataclasses.replace(ex.engines, attention=attend)
        made.model.through_layers(dataclasses.replace(ex, engines=engines, bounds=None), params, batch)
    return found


def layers_of(run, params):
    """The weights of each layer's attention, in order, without those of recurrences."""
    leaves, found = trees.leaves_of(params), []
    for place, index in parity.assemble(run).model.places():
        own = {name.removeprefix(f"{place}/attention/"): a[index] for name, a in leaves.items()
               if name.startswith(f"{place}/attention/")}
        found += [own] if own else []
    return found


@pytest.mark.parametrize("model", MODELS)
def test_the_heads_whose_scores_are_too_large_are_scaled_by_what_a_plain_computation_says(model):
    run = run_of(model)
    before, after, metrics = stepped(run)
    bounds = plain_bounds(run, before)
    assert metrics["score_bound_max"] == pytest.approx(max(b.max() for b in bounds), rel=1e-5)
    assert metrics["clipped_heads"] == sum((b > LIMIT).sum() for b in bounds)
    assert 0 < metrics["clipped_heads"] < sum(len(b) for b in bounds)
    for bound, old, new in zip(bounds, layers_of(run, before), layers_of(run, after), strict=True):
        gamma, num_kv_heads = np.minimum(1, LIMIT / np.maximum(bound, 1e-9)), old["key/kernel"].shape[1]
        factors = {}
        if model == "latents":
            factors["key"] = np.sqrt(gamma)[:, None]
            factors["query"] = np.concatenate([np.tile(np.sqrt(gamma)[:, None], 8), np.tile(gamma[:, None], 6)], 1)
        else:
            worst = gamma.reshape(num_kv_heads, -1).min(1)
            power = 1 if model == "tied" else 0.5
            factors["key"] = worst[:, None] ** (1 - power)
            factors["query"] = np.repeat(worst, len(gamma) // num_kv_heads)[:, None] ** power
        for name, w in old.items():
            np.testing.assert_allclose(new[name], w * factors.get(name.split("/")[0], 1.0), rtol=2e-5, atol=2e-6,
                                       err_msg=name)


@pytest.mark.parametrize("model, mesh, sections", [
    ("heads", dict(fsdp=2, tensor=2), dict(training=dict(microbatches=2, remat="full"))),
    *(pytest.param(*case, marks=sampling.GRID) for case in [
        ("heads", dict(context=2, data=2), dict(training=dict(remat="selective"), optimizer=dict(name="lion"))),
        ("latents", dict(context=2, tensor=2), dict(context=dict(method="gather")))]),
])
def test_a_layout_clips_what_one_device_clips(model, mesh, sections):
    _, after, metrics = stepped(run_of(model, mesh, **sections))
    _, expected, numbers = stepped(run_of(model, optimizer=sections.get("optimizer", {})))
    assert metrics["clipped_heads"] == numbers["clipped_heads"] > 0
    assert metrics["score_bound_max"] == pytest.approx(numbers["score_bound_max"], rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), after, expected)


def test_a_limit_above_all_scores_changes_no_bit():
    _, after, metrics = stepped(run_of("heads", limit=1e6))
    _, expected, without = stepped(run_of("heads", limit=0.0))
    assert metrics["clipped_heads"] == 0 and "clipped_heads" not in without
    jax.tree.map(np.testing.assert_array_equal, after, expected)


@pytest.mark.parametrize("sections, words", [
    (dict(model=BASE | dict(qk_norm="head")), 'model.qk_norm="head"'),
    (dict(model=BASE | dict(score_softcap=5.0)), "model.score_softcap=5"),
    (dict(model=MODELS["latents"] | dict(mixers="G")), 'model.mixers="G"'),
    (dict(model=BASE, lora=dict(rank=2)), "lora.rank=2"),
    (dict(model=BASE, mesh=dict(stage=2)), "mesh.stage=1"),
])
def test_what_it_cannot_clip_is_refused(sections, words):
    problems = config.problems(config.Run(optimizer=dict(qk_clip=100.0), **sections))
    assert any(words in problem and "optimizer.qk_clip=100" in problem for problem in problems), problems
