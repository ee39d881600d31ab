"""Depths of multi-token prediction with experts: the loss and every gradient are those of a plain loop in float64, on every
layout, with the balance of their experts."""
import jax
import jax.numpy as jnp
import numpy as np
import parity
import pytest

import experts
import reference
from meshtrain import config
from meshtrain.model import mtp
from meshtrain.parity import compare

V, D, T, ROWS, WEIGHT = 259, 16, 16, 8, 0.3
MODEL = dict(vocab_size=V, embed_dim=D, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=24, mtp_layers=2,
             num_experts=4, experts_per_token=2, expert_mlp_dim=16, shared_expert_dim=8, router_bias="choice",
             router_score="sigmoid", compute_dtype="float32")
LATENTS = dict(head_dim=12, num_kv_heads=4, latent=dict(query_dim=12, kv_dim=8, rope_dim=4, value_dim=8))


def run_of(mesh, rule, model=None, training=None, experts=None, **sections) -> config.Run:
    return config.Run(
        mesh=mesh, sharding=dict(rules=str(parity.RULES / f"{rule}.toml")), model=MODEL | (model or {}),
        experts=dict(aux_loss=0.5, z_loss=0.05, bias_rate=1e-3) | (experts or {}), data=dict(seq_len=T, global_batch=ROWS),
        training=dict(mtp_weight=WEIGHT, steps=9) | (training or {}), **sections)


def ahead(array, segments, k):
    """array[b, t + k], -1 where another document is there, or none."""
    out = np.full(array.shape, -1)
    for b, t in np.ndindex(*array.shape):
        if t + k < array.shape[1] and segments[b, t] and segments[b, t + k] == segments[b, t]:
            out[b, t] = array[b, t + k]
    return out


def objective(m, e, params, batch, choices):
    """(objective, ([nll of the model and of each depth, summed], counts [L + depths, E], choices, gaps))."""
    segments, num_depths = np.asarray(batch["segments"]), m["mtp_layers"]
    made, counts, gaps, aux = [], [], [], []

    def layer(p, x, real):
        x = x + reference.attention(m, p["attention"], reference.norm(m, p["attention_norm"], x), batch["positions"],
                                    segments)
        y, more, count, choice, gap = experts.moe(
            m, e, p["moe"], reference.norm(m, p["mlp_norm"], x), choices[len(made)] if choices else None, real, None)
        for name, value in ((made, choice), (counts, count), (gaps, gap), (aux, more)):
            name.append(value)
        return x + y

    def nll(h, targets):
        scores = (h @ params["head"]["kernel"])[..., :V]
        picked = jnp.take_along_axis(scores, np.maximum(targets, 0)[..., None], -1)[..., 0]
        return jnp.where(targets >= 0, jax.nn.logsumexp(scores, -1) - picked, 0).sum()
    table = params["embedding"]["table"]
    x = table[batch["tokens"]]
    for number in range(m["num_layers"]):
        x = layer(jax.tree.map(lambda leaf, at=number: leaf[at], params["layers"]), x, segments != 0)
    h = reference.norm(m, params["final_norm"], x)
    sums = [nll(h, batch["targets"])]
    for k in range(1, num_depths + 1):
        p, tokens = params[mtp.name(k)], ahead(batch["tokens"], segments, k)
        merged = reference.norm(m, p["embedding_norm"], table[np.maximum(tokens, 0)]) @ p["from_embedding"]["kernel"]
        merged = merged + reference.norm(m, p["hidden_norm"], h) @ p["from_hidden"]["kernel"]
        h = reference.norm(m, p["norm"], layer(p["layer"], merged, tokens >= 0))
        sums.append(nll(h, ahead(batch["targets"], segments, k)))
    total = (sums[0] + WEIGHT / num_depths * sum(sums[1:])) / (batch["targets"] >= 0).sum()
    return total + sum(aux) / (segments != 0).sum(), (jnp.stack(sums), counts, made, gaps)


def test_losses_gradients_and_loads_are_those_of_plain_loops_in_float64():
    run = run_of({}, "ddp")
    made = parity.assemble(run)
    params, batch = parity.draw_parameters(made, 0), parity.batch_of(run, 0)
    with jax.default_matmul_precision("highest"), jax.set_mesh(made.mesh):
        grads, loss, count, metrics = jax.device_get(jax.jit(made.program.gradients)(
            jax.device_put(params, made.program.step.state.sharding.params), made.program.place(batch), None))
    m, e = (run.model_dump()[name] for name in ("model", "experts"))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float64), params)
        _, (sums, counts, choices, gaps) = objective(m, e, wide, batch, None)
        wanted = jax.device_get(jax.grad(lambda p: objective(m, e, p, batch, choices)[0])(wide))
    assert min(gaps) > 1e-5, "another seed: rounding may choose other experts"
    wanted["layers"]["moe"]["bias"] = np.stack(counts[:2])
    for k in (1, 2):
        wanted[mtp.name(k)]["layer"]["moe"]["bias"] = counts[1 + k]
        ahead_k = (ahead(batch["targets"], batch["segments"], k) >= 0).sum()
        assert mtp.report(metrics)[f"mtp_loss_{k}"] == pytest.approx(float(sums[k]) / ahead_k, rel=1e-5)
    assert loss == pytest.approx(float(sums[0]) / count, rel=1e-5)
    # float32 against float64, after five layers: the largest difference is 4e-6 of a leaf's largest number
    worst = jax.tree.map(lambda a, b: np.abs(a - b).max() / np.abs(b).max(), grads, wanted)
    assert max(jax.tree.leaves(worst)) < 5e-5, worst
    np.testing.assert_allclose(metrics["expert_load"] * count, np.stack(counts), rtol=1e-6)
    places = np.stack(counts).sum(-1) / 2
    assert list(places) == [(batch["segments"] > 0).sum()] * 2 + [
        (ahead(batch["tokens"], batch["segments"], k) >= 0).sum() for k in (1, 2)], "no expert for a place without a token"


STAGED = dict(training=dict(microbatches=2))
CELLS = {
    "expert over fsdp, balance of the batch": dict(
        mesh=dict(data=2, fsdp=2), rule="zero3_experts_fsdp", experts=dict(balance="batch")),
    "expert over tensor, 2 microbatches": dict(mesh=dict(fsdp=2, tensor=2), rule="zero3_experts_tensor", **STAGED),
    "expert over fsdp, ring, remat full, latents": dict(
        mesh=dict(context=2, fsdp=2), rule="zero3_experts_fsdp", training=dict(remat="full"), model=LATENTS),
    "stages, expert over fsdp": dict(mesh=dict(stage=2, fsdp=2), rule="zero3_experts_fsdp",
                                     pipeline=dict(schedule="1f1b"), **STAGED),
    "stages, expert over tensor, latents": dict(mesh=dict(stage=2, tensor=2), rule="zero3_experts_tensor", model=LATENTS,
                                                pipeline=dict(schedule="zero_bubble"), **STAGED),
}


@pytest.mark.parametrize("cell", CELLS)
def test_layouts_compute_what_one_device_does(cell):
    """Loss, metrics of every depth, loads and every gradient."""
    given = dict(CELLS[cell])
    case = parity.check(run_of(model=dict(mtp_layers=1) | given.pop("model", {}), **given))
    metrics = compare.train(case, parity.draw_parameters(case.made, 0), 1)[1]
    assert {"mtp_loss_1", "aux_loss"} <= metrics.keys() and len(metrics["expert_load_max_by_layer"]) == 3
