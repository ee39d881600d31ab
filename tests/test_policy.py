"""The policy-gradient objective: TRL's losses, the papers' formulas in float64, and the same through a model on every
layout, however answers are packed and microbatches cut."""
import dataclasses
import functools
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import parity
import pytest
import reference
import sampling

from meshtrain import assembly, config
from meshtrain.data.batches import answers as answers_of
from meshtrain.data.batches.answers import DrawnAnswer
from meshtrain.model.layers import Execution
from meshtrain.names import NO_TARGET
from meshtrain.sharding import rules
from meshtrain.sharding.rules import Layout
from meshtrain.training import objective
from meshtrain.training.policy import Policy
from meshtrain.training.state import State
from test_layouts import MODEL, ONE, run_of
from test_lora import assert_equal_gradients

GOLDEN = json.loads((Path(__file__).parent / "goldens" / "policy_losses.json").read_text())
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


WHOLE = Execution(Layout(rules.parse(""), dict.fromkeys(parity.AXES, 1)), jnp.dtype("float32"), None)


def loss_and_slopes(policy: Policy, aggregate: str, drawn: list[DrawnAnswer], logps, rows: int, seq_len: int,
                    max_tokens: int = LONGEST):
    """(loss, its derivative by each answer's log-probabilities, metrics [B, T]), float32."""
    batch, places = answers_of.pack(drawn, rl_of(policy, aggregate, max_tokens), rows, seq_len, 0)
    logp_BT = at_tokens([logp[:len(answer.tokens)] for answer, logp in zip(drawn, logps)], places, (rows, seq_len))
    real_BT = batch["targets"] != NO_TARGET
    total = objective.answer_sums(WHOLE, jnp.where(real_BT, batch["segments"], 0))
    given = {name: jnp.asarray(batch[name]) for name in policy.reads}
    loss_BT, slope_BT, metrics = policy.losses(jnp.float32(logp_BT), given, total)
    count = max(real_BT.sum(), 1)
    assert np.all(np.asarray(slope_BT)[~real_BT] == 0)
    slopes = answers_of.by_answer(np.asarray(slope_BT) / count, drawn, places)
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
                 correction_limit=2.0, clip_low=0.1, clip_high=0.1),
}


def rl_run(keys: dict, rule: str = "ddp", mesh: dict = ONE, microbatches: int = 1, model: dict = {},
           **sections) -> config.Run:
    run = run_of(rule, mesh, TINY | model, dict(objective="rl", grad_clip=0.0, microbatches=microbatches,
                                                loss_chunk=20))
    return run.replaced(data={"global_batch": ROWS, "seq_len": T}, rl=dict(max_tokens=LONGEST) | keys, **sections)


def moments_of(compiled: parity.Compiled, p, batch):
    """(metrics of a step from these host parameters, its gradients: adamw's first moment / (1 - b1))."""
    made, spec = compiled.made, compiled.made.program.step.state
    opt_state = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), spec.abstract.opt_state)
    state = jax.device_put(State(np.int32(0), p, opt_state), spec.sharding)
    state, metrics = compiled.step(state, made.program.place(batch))
    return jax.device_get(metrics), jax.tree.map(lambda m: m / (1 - made.run.optimizer.b1),
                                                 jax.device_get(parity.first_moment(state.opt_state)))


def log_softmax(run: config.Run, p, batch):
    """[B, T, V] at the run's temperature, from whole logits."""
    return jax.nn.log_softmax(reference.logits(run.model.model_dump(), p, batch) / run.rl.temperature, -1)


def of_answers(log_p_BTV, batch, drawn, places):
    """(log-probabilities, entropies) of each answer's tokens; empty where it is in no row."""
    logp_BT = jnp.take_along_axis(log_p_BTV, jnp.maximum(batch["targets"], 0)[..., None], -1)[..., 0]
    entropy_BT = -jnp.sum(jnp.exp(log_p_BTV) * log_p_BTV, -1)
    cut = lambda x_BT: [x_BT[row, place:place + len(answer.tokens)] if row >= 0 else jnp.zeros(len(answer.tokens))
                        for answer, (row, place) in zip(drawn, places.tolist())]
    return cut(logp_BT), cut(entropy_BT)


@functools.cache
def expected(name: str):
    """(parameters, answers, loss, gradients) of the plain computation with whole logits, one answer a row."""
    run = rl_run(KEYS[name])
    made = assembly.assemble(run, jax.devices()[:1])
    p = parity.drawn_parameters(made, 0)
    p["head"]["kernel"] = p["head"]["kernel"] * 8       # logits large enough to tell temperatures and entropies apart
    drawn, _ = drawn_answers(1)
    batch, places = answers_of.pack(drawn, run.rl, len(drawn), T, 0)
    with jax.default_matmul_precision("highest"):
        logps, _ = jax.jit(lambda p: of_answers(log_softmax(run, p, batch), batch, drawn, places))(p)
        rng = np.random.default_rng(5)
        noise = lambda logp, size: (np.asarray(logp) + size * rng.standard_normal(len(logp))).astype(np.float32)
        drawn = [dataclasses.replace(answer, sampled=noise(old := noise(logp, 0.3), 0.2), old=old,
                                     reference=noise(logp, 0.4)) for answer, logp in zip(drawn, logps)]
        policy, (rl, learned) = Policy.of(run.rl), (run.rl, [a for a in drawn if a.learned])
        entropy_weight = {"token": lambda n: 1 / sum(len(a.tokens) for a in learned),
                          "sequence": lambda n: 1 / (len(learned) * n)}[rl.aggregate]

        def loss(p):
            now, entropies = of_answers(log_softmax(run, p, batch), batch, drawn, places)
            bonus = sum(jnp.sum(h) * entropy_weight(len(h)) for h, a in zip(entropies, drawn)
                        if a.learned and len(a.tokens))
            return plain(policy, rl.aggregate, LONGEST, drawn, now, jax.lax.stop_gradient(now),
                         jnp) - rl.entropy * bonus
        value, grads = jax.jit(jax.value_and_grad(loss))(p)
    return p, drawn, float(value), jax.device_get(grads)


def batch_of(run: config.Run, drawn, rows: int = ROWS) -> dict:
    """The answers packed in the first of the rows; NaN where there is no token."""
    batch, _ = answers_of.pack(drawn, run.rl, rows, T, 0)
    for name in ("weight", *answers_of.OF_TOKENS):
        batch[name][batch["targets"] == NO_TARGET] = np.nan
    return batch


CASES = [("grpo", "ddp", ONE, 4), ("all", "zero3", dict(data=2, fsdp=2, tensor=2), 2), ("gspo", "ddp", ONE, 2)]
GRID = [(name, *case) for name in KEYS for case in (
    ("ddp", ONE, 1), ("zero3", dict(fsdp=2), 4), ("tensor", dict(tensor=2), 2), ("zero1", dict(context=2), 2),
    ("zero1", dict(data=2), 4), ("zero3", dict(fsdp=2, tensor=2, context=2), 2))]


@pytest.mark.parametrize("name, rule, mesh, microbatches",
                         [*CASES, *(pytest.param(*case, marks=sampling.GRID) for case in GRID)], ids=str)
def test_loss_and_every_gradient_are_those_of_whole_logits(name, rule, mesh, microbatches):
    p, drawn, loss, grads = expected(name)
    run = rl_run(KEYS[name], rule, mesh, microbatches)
    batch = batch_of(run, drawn)
    if microbatches > 1:
        assert np.all(batch["targets"][-ROWS // microbatches:] == NO_TARGET), "a microbatch is not computed"
    metrics, found = moments_of(parity.compiled(run), p, batch)
    assert abs(metrics["loss"] - loss) < 1e-5 * max(abs(loss), 0.1)
    assert_equal_gradients(found, grads, 1e-5)
    assert metrics["tokens"] == np.sum(batch["targets"] != NO_TARGET) and metrics["entropy"] > 0
    if run.rl.old == "auto":
        assert metrics["ratio"] == 1 and metrics["clip_low"] == 0 and metrics["clip_high"] == 0
