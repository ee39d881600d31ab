"""The policy-gradient objective: TRL's losses, the papers' formulas in float64, and the same through a model on every
layout, however answers are packed and microbatches cut."""
import dataclasses
import functools
import json
import re
import shutil
import tomllib
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import parity
import pytest
import reference
import sampling
import steps

from meshtrain import assembly, config
from meshtrain.config.sections import Rl
from meshtrain.inspection import memory
from meshtrain.names import NO_TARGET
from meshtrain.rl import answers as answers_of
from meshtrain.rl.answers import DrawnAnswer
from meshtrain.training import objective
from meshtrain.training.policy import Policy
from folders import GOLDENS, Loaded
from test_answers import by_answer
from test_collective_order import by_gloo  # noqa: F401
from test_dpo import moments_of
from test_layouts import MODEL, ONE, run_of
from test_lora import ALPHA, RANK, assert_equal_gradients, without_adapters

GOLDEN = json.loads((GOLDENS / "policy_losses.json").read_text())
TENSORS = {name: np.array(x) for name, x in GOLDEN["tensors"].items()}
AGGREGATE = {"grpo": "sequence", "dapo": "token", "dr_grpo": "constant", "cispo": "token"}
LONGEST = 9     # what Dr. GRPO divides by there


def settings(said: dict, correction) -> tuple[Policy, str]:
    """(policy, aggregate) of TRL's settings."""
    kind, low, high = said.get("loss_type", "dapo"), said.get("low", 0.2), said.get("high", 0.2)
    return Policy(
        ratio="cispo" if kind == "cispo" else said.get("level", "token"), clip_low=low,
        clip_high=high - 1 if kind == "cispo" else high, ratio_limit=said.get("delta") or 0.0,
        kl=said.get("beta", 0.0), kl_form="k3_corrected" if said.get("bias_kl") else "k3",
        correction="none" if correction is None else "token_mask", correction_limit=2.5,
        old="current" if said.get("current") else "trainer"), AGGREGATE[kind]


def golden_answers(case: dict) -> tuple[list[DrawnAnswer], np.ndarray]:
    """(answers with prompts of 2 tokens, their log-probabilities [answers, T])."""
    correction, found = case["correction"], []
    for i, n in enumerate(TENSORS["mask"].sum(1).astype(int)):
        old, sampled = TENSORS["old"][i, :n], TENSORS["sampler"][i, :n]
        if correction is not None:      # given as numbers: 0 stands for what is beyond the limit
            weight = np.array(correction)[i, :n]
            sampled = old - np.log(np.where(weight == 0, 3.0, weight))
        found.append(DrawnAnswer(np.zeros(2, int), np.arange(n), sampled, case["advantages"][i], True, old,
                                 TENSORS["reference"][i, :n]))
    return found, TENSORS["logps"]


def rl_of(policy: Policy, aggregate: str, max_tokens: int = LONGEST) -> SimpleNamespace:
    return SimpleNamespace(aggregate=aggregate, max_tokens=max_tokens, kl=policy.kl, entropy=policy.entropy)


def at_tokens(values: list, places, shape, fill: float = 0.0) -> np.ndarray:
    """[B, T]: the answers' values at their places."""
    out = np.full(shape, fill)
    for value, (row, place) in zip(values, places.tolist(), strict=True):
        if row >= 0:
            out[row, place:place + len(value)] = value
    return out


def loss_and_slopes(policy: Policy, aggregate: str, drawn: list[DrawnAnswer], logps, rows: int, seq_len: int,
                    max_tokens: int = LONGEST):
    """(loss, its derivative by each answer's log-probabilities, metrics [B, T]), float32."""
    batch, places = answers_of.pack(drawn, rl_of(policy, aggregate, max_tokens), rows, seq_len, 0)
    logp_BT = at_tokens([logp[:len(answer.tokens)] for answer, logp in zip(drawn, logps)], places, (rows, seq_len))
    real_BT = batch["targets"] != NO_TARGET
    total = objective.answer_sums(jnp.where(real_BT, batch["segments"], 0))
    given = {name: jnp.asarray(batch[name]) for name in policy.reads}
    loss_BT, slope_BT, metrics = policy.losses(jnp.float32(logp_BT), given, total)
    count = max(real_BT.sum(), 1)
    assert np.all(np.asarray(slope_BT)[~real_BT] == 0)
    slopes = by_answer(np.asarray(slope_BT) / count, drawn, places)
    return float(loss_BT.sum()) / count, slopes, metrics


@pytest.mark.parametrize("rows, seq_len", [(8, 8), (2, 24)], ids=["one a row", "packed"])
@pytest.mark.parametrize("name", GOLDEN["cases"])
def test_loss_and_gradient_are_those_of_trl(name, rows, seq_len):
    """Of the published trainer, in float64 (`tests/goldens`); relative to the largest gradient."""
    case = GOLDEN["cases"][name]
    drawn, logps = golden_answers(case)
    policy, aggregate = settings(case["settings"], case["correction"])
    loss, slopes, _ = loss_and_slopes(policy, aggregate, drawn, logps, rows, seq_len)
    expected = np.array(case["gradient"])
    scale = np.abs(expected).max()
    assert abs(loss - case["loss"]) < 1e-6 * max(scale, abs(case["loss"]))
    for slope, row in zip(slopes, expected, strict=True):
        wanted = np.zeros(0) if slope is None else row[:len(slope)]
        assert slope is not None or np.all(row == 0)
        assert slope is None or np.abs(slope - wanted).max() < 1e-6 * scale


# ---- the papers' formulas --------------------------------------------------------------------------------------------


def plain(policy: Policy, aggregate: str, max_tokens: int, drawn: list[DrawnAnswer], logps, fixed, xp=np):
    """The loss of a step without the entropy's, answer by answer. fixed: logps as what is not differentiated."""
    learned = [answer.learned for answer in drawn]
    tokens = sum(len(answer.tokens) for answer in drawn if answer.learned)
    loss = 0.0
    for answer, logp, constant in zip(drawn, logps, fixed, strict=True):
        A, n = answer.advantage, len(answer.tokens)
        if not answer.learned or not n:
            continue
        old = {"current": constant, "trainer": answer.old, "sampler": answer.sampled}[policy.old]
        ratio = xp.exp(logp - old)
        if policy.ratio == "sequence":
            ratio = xp.prod(ratio) ** (1 / n) + xp.zeros(n)
        if policy.ratio == "cispo":
            of_token = -xp.minimum(xp.exp(constant - old), 1 + policy.clip_high) * A * logp
        else:
            most = xp.minimum(ratio, policy.ratio_limit) if policy.ratio_limit else ratio
            if A >= 0:
                of_token = -A * xp.minimum(most, 1 + policy.clip_high)
            else:
                of_token = -A * xp.maximum(most, xp.clip(ratio, 1 - policy.clip_low, 1 + policy.clip_high))
                if policy.dual_clip:
                    of_token = xp.minimum(of_token, -policy.dual_clip * A)
        if policy.correction != "none":
            kind, what = policy.correction.split("_")
            past = constant if policy.old == "current" else old
            weight = xp.exp(past - answer.sampled)
            weight = xp.prod(weight) if kind == "sequence" else weight
            limit = policy.correction_limit
            of_token = of_token * (xp.minimum(weight, limit) if what == "truncate" else weight * (weight <= limit))
        if policy.kl:
            u = xp.exp(answer.reference - logp)
            k = {"k1": -xp.log(u), "k2": xp.log(u) ** 2 / 2, "k3": u - 1 - xp.log(u),
                 "k3_corrected": ratio * (u - 1 - xp.log(u))}[policy.kl_form]
            of_token = of_token + policy.kl * k
        loss = loss + xp.sum(of_token) / {"token": tokens, "sequence": sum(learned) * n,
                                          "constant": sum(learned) * max_tokens}[aggregate]
    return loss


def drawn_answers(seed: int = 0, vocab: int = 61) -> tuple[list[DrawnAnswer], list[np.ndarray]]:
    """(answers of many lengths, some of advantage 0, one empty, one that is not learned; their log-probabilities)."""
    rng, found, logps = np.random.default_rng(seed), [], []
    for i, n in enumerate((3, 1, 6, 0, 4, 2, 7, 5, 3, 1, 4)):
        logp = -3 * rng.random(n)
        old = logp + 0.5 * rng.standard_normal(n)
        found.append(DrawnAnswer(
            rng.integers(0, vocab, 1 + i % 3), rng.integers(0, vocab, n), old + 0.3 * rng.standard_normal(n),
            0.0 if i == 5 else float(rng.standard_normal()), i != 8, old, logp + 0.4 * rng.standard_normal(n)))
        logps.append(logp)
    return found, logps


POLICIES = {
    "dual clip": (Policy(dual_clip=1.2, old="trainer"), "token"),
    "dual clip, limit": (Policy(dual_clip=1.5, ratio_limit=1.3, old="trainer"), "sequence"),
    "k1": (Policy(kl=0.2, kl_form="k1"), "token"),
    "k2": (Policy(kl=0.2, kl_form="k2", old="trainer"), "constant"),
    "sampler": (Policy(old="sampler", clip_low=0.1, clip_high=0.3), "token"),
    "current, corrected": (Policy(correction="token_truncate", correction_limit=1.1), "sequence"),
    "sequence mask": (Policy(correction="sequence_mask", correction_limit=1.5, old="trainer", kl=0.1), "token"),
    "sequence truncate": (Policy(correction="sequence_truncate", correction_limit=1.2), "token"),
    "gspo, all": (Policy("sequence", 0.1, 0.1, 1.05, 1.3, 0.1, "k3_corrected", 0.0, "token_truncate", 1.2, "trainer"),
                  "sequence"),
    "gspo, current": (Policy("sequence", kl=0.1, kl_form="k3_corrected", correction="token_mask"), "sequence"),
    "cispo, all": (Policy("cispo", clip_high=0.2, kl=0.1, kl_form="k3_corrected", correction="token_mask",
                          correction_limit=1.2, old="trainer"), "constant"),
}


@pytest.mark.parametrize("name", POLICIES)
def test_loss_and_gradient_are_the_papers_in_float64(name):
    policy, aggregate = POLICIES[name]
    drawn, logps = drawn_answers()
    of = lambda logps_now: plain(policy, aggregate, LONGEST, drawn, logps_now, logps)
    expected, step = [np.zeros_like(logp) for logp in logps], 1e-6
    for answer, logp in enumerate(logps):       # central differences
        for t in range(len(logp)):
            ends = []
            for sign in (1, -1):
                moved = [x.copy() for x in logps]
                moved[answer][t] += sign * step
                ends.append(of(moved))
            expected[answer][t] = (ends[0] - ends[1]) / (2 * step)
    loss, slopes, metrics = loss_and_slopes(policy, aggregate, drawn, logps, 6, 16)
    scale = max(np.abs(x).max(initial=0) for x in expected)
    assert abs(loss - of(logps)) < 1e-6 * max(scale, abs(loss)) and scale > 0
    for slope, wanted in zip(slopes, expected, strict=True):
        assert (np.all(wanted == 0) if slope is None else np.abs(slope - wanted).max() < 1e-6 * scale)
    if policy.old == "current":
        assert np.all(metrics["ratio"] == 1) and not np.any(metrics["clip_low"]) and not np.any(metrics["clip_high"])


# ---- through a model -------------------------------------------------------------------------------------------------

T, ROWS = 16, 8
TINY = dict(MODEL, vocab_size=61, embed_dim=32, num_layers=1, num_heads=4, num_kv_heads=2, mlp_dim=48)
KEYS = {
    "grpo": dict(temperature=0.7, entropy=0.05),
    "all": dict(temperature=0.7, entropy=0.05, kl=0.1, kl_form="k3_corrected", dual_clip=1.2, old="trainer",
                correction="token_truncate", correction_limit=1.2, aggregate="sequence"),
    "gspo": dict(temperature=1.3, entropy=0.05, ratio="sequence", kl=0.1, old="trainer", correction="sequence_mask",
                 correction_limit=1.2, clip_low=0.1, clip_high=0.1),
    "softcap": dict(temperature=0.7, entropy=0.05, ratio="cispo", old="trainer", clip_high=0.1),
}
MODELS = {"softcap": dict(logit_softcap=3.0, tie_embeddings=True)}


def rl_run(keys: dict, rule: str = "ddp", mesh: dict = ONE, microbatches: int = 1, model: dict = {},
           **sections) -> config.Run:
    run = run_of(rule, mesh, TINY | model, dict(objective="rl", grad_clip=0.0, microbatches=microbatches,
                                                loss_chunk=20))
    return run.replace(data={"global_batch": ROWS, "seq_len": T}, rl=dict(max_tokens=LONGEST) | keys, **sections)


LORA = dict(lora=dict(rank=RANK, alpha=ALPHA))


def log_softmax(run: config.Run, p, batch):
    """[B, T, V] at the run's temperature, from whole logits."""
    logits, cap = reference.logits(run.model.model_dump(), p, batch), run.model.logit_softcap
    return jax.nn.log_softmax((cap * jnp.tanh(logits / cap) if cap else logits) / run.rl.temperature, -1)


def of_answers(log_p_BTV, batch, drawn, places):
    """(log-probabilities, entropies) of each answer's tokens; empty where it is in no row."""
    logp_BT = jnp.take_along_axis(log_p_BTV, jnp.maximum(batch["targets"], 0)[..., None], -1)[..., 0]
    entropy_BT = -jnp.sum(jnp.exp(log_p_BTV) * log_p_BTV, -1)
    cut = lambda x_BT: [x_BT[row, place:place + len(answer.tokens)] if row >= 0 else jnp.zeros(len(answer.tokens))
                        for answer, (row, place) in zip(drawn, places.tolist())]
    return cut(logp_BT), cut(entropy_BT)


def by_temperature(p):
    """The head's weights grown: logits large enough to tell temperatures and entropies apart."""
    name = "head" if "head" in p else "embedding"
    p[name] = {key: 8 * w for key, w in p[name].items()}
    return p


@functools.cache
def expected(name: str, adapted: bool = False):
    """(parameters, answers, loss, gradients, metrics) of the plain computation with whole logits, an answer a row."""
    run = rl_run(KEYS[name], model=MODELS.get(name, {}), **LORA if adapted else {})
    made = assembly.assemble(run, jax.devices()[:1])
    p = by_temperature(parity.draw_parameters(made, 0))
    policy, rl, (drawn, _) = Policy.of(run.rl), run.rl, drawn_answers(1)
    batch, places = answers_of.pack([dataclasses.replace(answer, learned=True) for answer in drawn], rl, len(drawn), T,
                                    0)

    def scores(p):
        return of_answers(log_softmax(run, without_adapters(p), batch), batch, drawn, places)

    def loss(p):
        now, entropies = scores(p)
        learned = [i for i, answer in enumerate(drawn) if answer.learned and len(answer.tokens)]
        tokens, count = sum(len(now[i]) for i in learned), sum(answer.learned for answer in drawn)
        bonus = sum(entropies[i].sum() / (tokens if rl.aggregate == "token" else count * len(now[i])) for i in learned)
        return plain(policy, rl.aggregate, LONGEST, drawn, now, jax.lax.stop_gradient(now), jnp) - rl.entropy * bonus
    with jax.default_matmul_precision("highest"):
        logps, entropies = jax.device_get(jax.jit(scores)(p))
        rng = np.random.default_rng(5)
        noise = lambda logp, size: (logp + size * rng.standard_normal(len(logp))).astype(np.float32)
        drawn = [dataclasses.replace(answer, sampled=noise(old := noise(logp, 0.3), 0.2), old=old,
                                     reference=noise(logp, 0.4)) for answer, logp in zip(drawn, logps)]
        value, grads = jax.device_get(jax.jit(jax.value_and_grad(loss))(p))
    of_tokens = {"entropy": [], "kl": [], "ratio": [], "clip_low": [], "clip_high": [], "mismatch_mean": []}
    for answer, logp, entropy in zip(drawn, logps, entropies):
        if not answer.learned:
            continue
        ratio = np.exp(logp - (logp if policy.old == "current" else answer.old))
        if policy.ratio == "sequence" and len(ratio):
            ratio = np.full_like(ratio, np.exp(np.log(ratio).mean()))
        x, A = answer.reference - logp, answer.advantage
        new = {"entropy": entropy, "kl": np.exp(x) - x - 1, "ratio": ratio,
               "clip_low": (ratio < 1 - policy.clip_low) * (A < 0) * (policy.ratio != "cispo"),
               "clip_high": (ratio > 1 + policy.clip_high) * (A > 0),
               "mismatch_mean": np.abs((answer.old if policy.old == "trainer" else logp) - answer.sampled)}
        of_tokens = {key: [*values, *new[key]] for key, values in of_tokens.items()}
    metrics = {key: np.mean(values) for key, values in of_tokens.items() if key != "kl" or policy.kl}
    metrics["mismatch_max"] = max(of_tokens["mismatch_mean"])
    return p, drawn, float(value), made.model.divide(grads)[0], metrics


def batch_of(run: config.Run, drawn, rows: int = ROWS) -> dict:
    """The answers packed in the first of the rows; NaN where there is no token."""
    batch, _ = answers_of.pack(drawn, run.rl, rows, T, 0)
    for name in ("weight", *answers_of.OF_TOKENS):
        batch[name][batch["targets"] == NO_TARGET] = np.nan
    return batch


CASES = [("grpo", "ddp", ONE, 4), ("all", "zero3", dict(data=2, fsdp=2, tensor=2), 2),
         ("gspo", "zero1", dict(data=2, context=2), 2), ("softcap", "tensor", dict(tensor=2), 1)]
GRID = [(name, *case) for name in KEYS for case in (
    ("ddp", ONE, 1), ("zero3", dict(fsdp=2), 4), ("tensor", dict(tensor=2), 2), ("zero1", dict(context=2), 2),
    ("zero1", dict(data=2), 4), ("zero3", dict(fsdp=2, tensor=2, context=2), 2))]


@pytest.mark.parametrize("name, rule, mesh, microbatches",
                         [*CASES, *(pytest.param(*case, marks=sampling.GRID) for case in GRID)], ids=str)
def test_loss_and_every_gradient_are_those_of_whole_logits(name, rule, mesh, microbatches):
    """An answer a row there, packed rows here, the last of them empty."""
    p, drawn, loss, grads, told = expected(name)
    run = rl_run(KEYS[name], rule, mesh, microbatches, MODELS.get(name, {}))
    batch = batch_of(run, drawn)
    assert microbatches == 1 or np.all(batch["targets"][-ROWS // microbatches:] == NO_TARGET)
    metrics, found = moments_of(parity.compile_run(run), p, batch)
    assert abs(metrics["loss"] - loss) < 1e-5 * max(abs(loss), 0.1)
    assert_equal_gradients(found, grads, 1e-5)
    assert metrics["tokens"] == np.sum(batch["targets"] != NO_TARGET)
    for key, value in told.items():
        assert abs(metrics[key] - value) < 1e-5 * max(1, abs(value)), key
    if run.rl.old == "auto":
        assert metrics["ratio"] == 1 and metrics["clip_low"] == 0 and metrics["clip_high"] == 0
    else:
        assert 0 < metrics["clip_low"] + metrics["clip_high"] < 0.6


@pytest.mark.parametrize("rule, mesh, microbatches", [("ddp", ONE, 4), pytest.param(
    "zero3", dict(data=2, fsdp=2), 2, marks=sampling.GRID)], ids=str)
def test_adapters_have_the_gradients_of_whole_logits(rule, mesh, microbatches):
    p, drawn, loss, grads, _ = expected("grpo", adapted=True)
    run = rl_run(KEYS["grpo"], rule, mesh, microbatches, **LORA)
    metrics, found = moments_of(parity.compile_run(run), p, batch_of(run, drawn))
    assert abs(metrics["loss"] - loss) < 1e-5 * max(abs(loss), 0.1)
    assert_equal_gradients(found, grads, 2e-5)


EXPERTS = dict(model=dict(num_experts=4), experts=dict(aux_loss=0.5, z_loss=0.1))


@functools.cache
def with_experts(rule: str, mesh: tuple, microbatches: int) -> parity.Compiled:
    return parity.compile_run(rl_run(KEYS["grpo"], rule, dict(mesh), microbatches, **EXPERTS))


@pytest.mark.parametrize("rule, mesh, microbatches", [("zero3", dict(fsdp=2), 4), pytest.param(
    "zero3", dict(data=2, tensor=2), 2, marks=sampling.GRID)], ids=str)
def test_experts_learn_the_same_whatever_the_layout_and_the_microbatches(rule, mesh, microbatches):
    one, case = with_experts("ddp", (), 1), with_experts(rule, tuple(mesh.items()), microbatches)
    p, drawn = parity.draw_parameters(one.made, 0), expected("grpo")[1]
    batch = batch_of(one.made.run, drawn)
    (metrics, grads), (found_metrics, found) = (moments_of(made, p, batch) for made in (one, case))
    assert metrics["aux_loss"] > 0
    for key in ("loss", "aux_loss", "mismatch_max", "mismatch_mean"):
        assert abs(metrics[key] - found_metrics[key]) < 1e-5 * abs(metrics[key])
    assert_equal_gradients(found, grads, 2e-5)


def test_microbatches_behind_the_last_target_are_not_computed():
    """Tokens there would add to the experts' loss; the divisor counts them, so it tells how many were computed."""
    case, drawn = with_experts("zero3", (("fsdp", 2),), 4), expected("grpo")[1]
    p, batch = parity.draw_parameters(case.made, 0), batch_of(case.made.run, drawn)
    assert np.all(batch["segments"][-2:] == 0)
    of_padding, _ = moments_of(case, p, batch)
    tokens = np.sum(batch["segments"] != 0)
    batch["segments"][-2:] = 1
    of_tokens, _ = moments_of(case, p, batch)
    assert abs(of_tokens["aux_loss"] * (tokens + 2 * T) - of_padding["aux_loss"] * tokens) < 1e-4


def test_a_step_without_a_target_is_finite():
    case = with_experts("zero3", (("fsdp", 2),), 4)
    p = parity.draw_parameters(case.made, 0)
    metrics, grads = moments_of(case, p, batch_of(case.made.run, []))
    assert not metrics["skipped"] and metrics["loss"] == 0 and metrics["grad_norm"] == 0 and metrics["tokens"] == 1
    assert all(np.all(g == 0) for g in jax.tree.leaves(grads)) and metrics["mismatch_max"] == 0


@pytest.mark.parametrize("mesh", [dict(data=2, context=2), pytest.param(ONE, marks=sampling.GRID)], ids=str)
def test_scores_are_the_log_probabilities_at_the_temperature_in_the_order_of_the_row(mesh):
    p, drawn, *_ = expected("grpo")
    run = rl_run(KEYS["grpo"], "zero1", mesh, 4)
    made = parity.assemble(run)
    batch, places = answers_of.pack(drawn, run.rl, ROWS, T, 0)
    spec = made.program.step
    with jax.default_matmul_precision("highest"):
        scores = made.program.compile_function(made.program.scores, spec.state.abstract.params, spec.batch)
        found = np.asarray(scores(jax.device_put(p, spec.state.sharding.params), made.program.place(batch)))
        assert found.shape == spec.batch["targets"].shape
        found = found.reshape(ROWS, T)
        logps, _ = jax.jit(lambda p: of_answers(log_softmax(run, p, batch), batch, drawn, places))(p)
    for score, logp in zip(by_answer(found, drawn, places), logps, strict=True):
        assert score is None or np.abs(score - logp).max() < 2e-6 * np.abs(logp).max()
    assert np.all(found[batch["targets"] == NO_TARGET] == 0)


def test_the_head_multiplies_no_more_than_that_of_the_next_token():
    """Three matmuls, not four, and as many trips are counted as there are microbatches. The loop is found that carries
    the accumulators."""
    found = []
    for training in (dict(objective="rl"), dict(objective="next_token")):
        case = parity.compile_run(rl_run(KEYS["grpo"], microbatches=4).replace(training=training))
        assert not case.audit.unknown_loops
        assert memory.measure(case.made, case.step)["grads"] == memory.formula(case.made)["grads"]
        found.append(case.audit.flops)
    assert found[0] == found[1]


def test_stages_are_refused():
    run = rl_run({}).replace(mesh={"stage": 2}, model={"num_layers": 2})
    with pytest.raises(config.ConfigError, match='mesh.stage=2: pipelines do not support training.objective="rl"'):
        parity.assemble(run)


def test_a_step_of_several_processes_has_one_order(by_gloo):
    """As `test_collective_order`: the loops of the head, what is gathered between them, and the metrics."""
    case = parity.compile_run(rl_run(KEYS["gspo"], "zero3", dict(data=2, fsdp=2, context=2), 2))
    assert steps.meeting(case.step.as_text(), case.made.mesh.size) == []
    p, drawn, loss, grads, _ = expected("gspo")
    metrics, found = moments_of(case, p, batch_of(case.made.run, drawn))
    assert abs(metrics["loss"] - loss) < 1e-5 * max(abs(loss), 0.1)
    assert_equal_gradients(found, grads, 1e-5)
    spec, program = case.made.program.step, case.made.program
    scores = program.compile_function(program.scores, spec.state.abstract.params, spec.batch)
    assert steps.meeting(scores.as_text(), case.made.mesh.size) == []


THEIRS = json.loads((GOLDENS / "policy" / "answers.json").read_text())


@pytest.mark.parametrize("name, rule, mesh, microbatches", [
    ("dapo", "zero3", dict(data=2, fsdp=2, tensor=2), 2),
    *(pytest.param(name, "ddp", ONE, 1, marks=sampling.GRID) for name in THEIRS["cases"])], ids=str)
def test_loss_and_gradient_of_every_weight_are_those_of_trl_with_transformers(name, rule, mesh, microbatches, tmp_path):
    """Of a model folder that we wrote, an answer a row there (`policy_goldens.py`), packed rows here. Their gradients
    are read as if they were weights."""
    case = THEIRS["cases"][name]
    shutil.copy(GOLDENS / "policy" / "config.json", tmp_path)
    shutil.copy(GOLDENS / "policy" / f"{name}.safetensors", tmp_path / "model.safetensors")
    loaded, wanted = (Loaded(place, rule, mesh, f"--training.microbatches={microbatches}")
                      for place in (GOLDENS / "policy", tmp_path))
    run = loaded.run.replace(data=dict(seq_len=T, global_batch=ROWS), rl=dict(max_tokens=LONGEST) | case["rl"],
                              training=dict(objective="rl", grad_clip=0.0, loss_chunk=20), optimizer=dict(name="adamw"))
    drawn = [DrawnAnswer(np.array(one["prompt"]), np.array(one["tokens"]), *map(np.array, (sampled, one["advantage"])),
                         True, *map(np.array, scores)) for one, sampled, *scores in zip(
                             THEIRS["answers"], *(case[key] for key in ("sampled", "old", "reference")), strict=True)]
    metrics, found = moments_of(parity.compile_run(run), jax.device_get(loaded.params), batch_of(run, drawn))
    assert abs(metrics["loss"] - case["loss"]) < 1e-5 * max(abs(case["loss"]), 0.1)
    assert_equal_gradients(found, jax.device_get(wanted.params), 2e-5)


# ---- enumeration -----------------------------------------------------------------------------------------------------

VOCABULARY, END, PROMPT = 8, 0, 3
EVERY = [(END,), *((a, b) for a in range(1, VOCABULARY) for b in range(VOCABULARY))]      # the answers of at most 2


@functools.cache
def enumerated(correction: str) -> parity.Compiled:
    return parity.compile_run(rl_run(
        dict(aggregate="constant", max_tokens=2, correction=correction, correction_limit=1e9, temperature=0.8),
        model=dict(vocab_size=VOCABULARY)))


def probabilities(run: config.Run, p):
    """[answers]: of each of EVERY, from whole logits."""
    tokens = np.array([[PROMPT, *answer[:1]] for answer in EVERY])
    batch = {"tokens": tokens, "segments": np.ones_like(tokens), "positions": np.arange(2) * np.ones_like(tokens)}
    log_p_BTV = log_softmax(run, p, batch)
    return jnp.exp(jnp.stack([sum(log_p_BTV[i, t, token] for t, token in enumerate(answer))
                              for i, answer in enumerate(EVERY)]))


@pytest.mark.parametrize("how, correction", [
    ("reinforce", "on policy"), ("loo", "on policy"), ("group", "on policy"), ("loo", "sequence_truncate"),
    ("loo", "none")])
def test_the_mean_over_every_answer_is_the_exact_gradient_of_the_reward(how, correction):
    """d/dp of the sum of probability · reward. A group of two has half of it (the mean holds the reward itself). Drawn
    by other weights it is exact with the product of an answer's ratios as the correction, and biased without."""
    share = 0.5 if how == "group" else 1.0
    case = enumerated("none" if correction == "on policy" else correction)
    p, other = (by_temperature(parity.draw_parameters(case.made, seed)) for seed in (0, 1))
    run, rewards = case.made.run, np.random.default_rng(2).standard_normal(len(EVERY))
    with jax.default_matmul_precision("highest"):
        exact = jax.device_get(jax.jit(jax.grad(lambda p: probabilities(run, p) @ rewards))(p))
        drawn_by = np.float64(probabilities(run, p if correction == "on policy" else other))
    assert abs(drawn_by.sum() - 1) < 1e-5
    if how == "reinforce":
        advantage = rewards
    else:       # the mean over whom an answer is drawn with
        pairs = np.stack(np.meshgrid(rewards, rewards, indexing="ij"), -1).reshape(-1, 2)
        advantage = answers_of.advantages(pairs, how)[:, 0].reshape(len(EVERY), -1) @ drawn_by
    sampled = log_probabilities_of(run, p if correction == "on policy" else other)
    drawn = [DrawnAnswer(np.array([PROMPT]), np.array(answer), logp, a * mu * len(EVERY) * 2)
             for answer, logp, a, mu in zip(EVERY, sampled, advantage, drawn_by, strict=True)]
    _, found = moments_of(case, p, batch_of(run, drawn))
    flat = lambda tree: np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)])
    off = np.linalg.norm(flat(found) + share * flat(exact)) / np.linalg.norm(share * flat(exact))
    assert off > 0.1 if correction == "none" else off < 1e-5


def log_probabilities_of(run: config.Run, p) -> list[np.ndarray]:
    drawn = [DrawnAnswer(np.array([PROMPT]), np.array(answer), np.zeros(len(answer)), 1.0) for answer in EVERY]
    batch, places = answers_of.pack(drawn, run.rl, ROWS, T, 0)
    with jax.default_matmul_precision("highest"):
        return jax.device_get(of_answers(log_softmax(run, p, batch), batch, drawn, places)[0])


# ---- the table of algorithms -----------------------------------------------------------------------------------------


def algorithms() -> dict[str, dict]:
    """Of docs/rl.md: the keys of [rl] by name."""
    text = (Path(__file__).resolve().parent.parent.parent / "docs" / "rl.md").read_text().split("## Algorithms")[1]
    found = {}
    for line in text.split("\n\n")[2].splitlines()[2:]:
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        keys = dict(zip(("advantage", "aggregate", "ratio"), (cell.strip("`") for cell in cells)))
        more = tomllib.loads("\n".join(re.findall(r"`(\w+ = [^`]+)`", cells[3])))
        found[name.split(" (")[0]] = keys | more
    return found


def test_the_table_has_the_algorithms_that_people_name():
    assert list(algorithms()) == ["GRPO", "DAPO", "Dr. GRPO", "RLOO", "GSPO", "CISPO"]


@pytest.mark.parametrize("name, case", [("GRPO", "grpo, kl k3"), ("DAPO", "dapo, clip higher"), ("Dr. GRPO", "dr_grpo"),
                                        ("GSPO", "gspo"), ("CISPO", "cispo")])
def test_each_algorithm_of_the_table_is_what_trl_is_compared_with(name, case):
    keys, golden = algorithms()[name], GOLDEN["cases"][case]
    trl, aggregate = settings(golden["settings"], golden["correction"])
    policy = Policy.of(Rl(**{"updates": 2} | keys))
    if name == "CISPO":         # the published case has a tighter limit
        policy = dataclasses.replace(policy, clip_high=trl.clip_high)
    compared = dataclasses.replace(policy, correction_limit=trl.correction_limit)
    assert (compared, keys["aggregate"]) == (trl, aggregate)
    found = answers_of.advantages(TENSORS["rewards"], keys["advantage"]).ravel()
    np.testing.assert_allclose(found, golden["advantages"], atol=1e-6)


def test_rloo_of_the_table_is_its_papers_gradient():
    """Of the mean over answers of (the reward less the mean of the others') · the log-probability of the answer."""
    keys = algorithms()["RLOO"]
    rewards_PN, lengths = np.array([[1.0, 0.0, 3.0], [2.0, 2.5, 0.0]]), (3, 1, 4, 2, 5, 1)
    advantages = answers_of.advantages(rewards_PN, keys["advantage"]).ravel()
    by_hand = [r - (row.sum() - r) / 2 for row in rewards_PN for r in row]
    np.testing.assert_allclose(advantages, by_hand)
    drawn = [DrawnAnswer(np.zeros(2, int), np.arange(n), np.zeros(n), a) for n, a in zip(lengths, advantages)]
    policy = Policy.of(Rl(**keys))
    _, slopes, _ = loss_and_slopes(policy, keys["aggregate"], drawn, [np.full(n, -1.0) for n in lengths], 6, 8)
    for slope, a in zip(slopes, by_hand):
        np.testing.assert_allclose(slope * LONGEST, -a / len(lengths))
