"""Depths of multi-token prediction draft: the answers are those without drafts, and passes are as few as whole passes
of the depths foretell."""
import collections
import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sampling as cells
from commands import call, home, ran, refused, tiny  # noqa: F401
from folders import GOLDENS

from meshtrain import config, trained
from meshtrain.commands import generate
from meshtrain.inference import passes, placement
from meshtrain.inference.generate import GenerationLimits
from meshtrain.inference.sampling import Picking
from meshtrain.kernels import decode, rotation
from meshtrain.model import transformer
from meshtrain.sharding.mesh import MeshSpec

VOCAB = 7       # a depth that knows nothing is right every seventh time
MODEL = dict(vocab_size=VOCAB, embed_dim=24, num_layers=2, num_heads=6, num_kv_heads=3, head_dim=8, mlp_dim=40,
             compute_dtype="float32")
LINEAR = dict(key_heads=3, value_heads=6, key_dim=8, value_dim=4, conv_width=3)
MODELS = {"windows": dict(mixers="FW", window=64), "recurrent": dict(mixers="GF", linear=LINEAR),
          "experts": dict(mlps="ed", num_experts=4, experts_per_token=2, expert_mlp_dim=16),
          "latents": dict(latent=dict(kv_dim=16, rope_dim=4, value_dim=8))}
ONE, EIGHT = {}, dict(data=2, fsdp=2, tensor=2)
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(1, VOCAB, n).tolist() for n in (1, 2, 30, 59)]


@functools.lru_cache(maxsize=2)
def loaded(name: str, drafts: int, seed: int = 0, **sizes) -> trained.LoadedModel:
    run, spec = config.Run(model=MODEL | MODELS[name] | dict(mtp_layers=drafts)), MeshSpec(sizes)
    model = transformer.build(run.model)
    mesh = spec.build(jax.devices()[:int(np.prod(list(sizes.values()) or [1]))])
    with jax.set_mesh(mesh):
        params = jax.jit(model.init)(jax.random.key(seed))
        params["head"] = jax.tree.map(lambda w: 3 * w, params["head"])
        ex = trained.execution(run, model, placement.command(model, spec.sizes), mesh)
        return trained.LoadedModel(model, mesh, ex, params, trained.Compiler(mesh, {}))


def complete(on: trained.LoadedModel, prompts=PROMPTS, how=Picking(), stops=(), **changed):
    """(answers of 80 tokens at most, the generator): four slots for up to eight answers."""
    with jax.set_mesh(on.mesh), jax.default_matmul_precision("highest"):
        made = dataclasses.replace(on.generator(on.model.cfg.mtp_layers), slots=4, **changed)
        samples = [1 + bool(how.temperature)] * len(prompts)
        return made.complete(prompts, GenerationLimits(80, stops), how, 3, samples=samples), made


def check_passes(answers, made) -> None:
    """Each pass gave a slot one token and the accepted drafts, and the answers need all of them."""
    counts = {tokens: n for tokens, n in made.counts.items() if tokens}
    assert set(counts) <= set(range(1, made.drafts + 2)) and max(counts) > 1
    assert sum(tokens * n for tokens, n in counts.items()) == sum(len(one.tokens) for one in answers)


@functools.lru_cache(maxsize=2)
def answer_without(name: str, how: Picking, stops: tuple[int, ...]):
    return complete(loaded(name, 0), how=how, stops=stops)[0]


@pytest.mark.parametrize(("name", "drafts", "sizes", "temperature"), [
    *(pytest.param(name, 2, ONE, 0, id=name) for name in MODELS), pytest.param("windows", 2, ONE, 0.9, id="sampled"),
    pytest.param("recurrent", 1, EIGHT, 0.9, id="eight devices"),
    *(pytest.param(name, drafts, sizes, tau, marks=cells.GRID, id=f"{name}, {drafts}, {sizes}, {tau}")
      for name in MODELS for drafts in (1, 3) for tau in (0, 0.9)
      for sizes in (ONE, EIGHT, dict(tensor=2), dict(fsdp=2), dict(data=2)))])
def test_answers_are_those_without_drafts(name, drafts, sizes, temperature):
    """The likeliest tokens, or sampled ones until a stop token, which may be within accepted drafts."""
    given = Picking(temperature), (0,) if temperature else ()
    wanted = answer_without(name, *given)
    answers, made = complete(loaded(name, drafts, **sizes), PROMPTS, *given)
    assert answers == wanted
    check_passes(answers, made)
    for one, other in zip(answers, wanted):     # float32, of two programs
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-4)


def foretell(on: trained.LoadedModel, answers) -> collections.Counter:
    """How many passes give how many tokens, by whole passes of the model and its depths over each sequence."""
    N, model, counts = on.model.cfg.mtp_layers, on.model, collections.Counter()

    @jax.jit
    def drafts(params, tokens_BT):
        at_BT = jnp.arange(tokens_BT.shape[1])[None]
        batch = dict(tokens=tokens_BT, segments=jnp.ones_like(at_BT), index=at_BT, positions=at_BT,
                     sequence=jnp.arange(1))
        h_BTD, chosen = model.final_state(on.ex, params, model.through_layers(on.ex, params, batch)), []
        for k in range(1, N + 1):
            ahead = batch | dict(tokens=jnp.roll(tokens_BT, -k, 1))
            h_BTD, _ = model.depth_state(on.ex, params, k, h_BTD, ahead, model.inputs(batch))
            chosen.append(model.state_logits(on.ex, params, h_BTD).argmax(-1)[0])
        return chosen
    for one in answers:
        whole, at = np.array(one.prompt + one.tokens), len(one.prompt) - 1
        with jax.set_mesh(on.mesh), jax.default_matmul_precision("highest"):
            chosen = drafts(on.params, np.pad(whole, (0, -len(whole) % 64))[None])
        while at < len(whole) - 1:
            right = [chosen[k - 1][at - 1] == whole[at + k] for k in range(1, min(N, len(whole) - 2 - at) + 1)]
            counts[1 + right.index(False) if False in right else 1 + len(right)] += 1
            at += 1 + right.index(False) if False in right else 1 + len(right)
    return counts


@pytest.mark.parametrize(("name", "seed"), [("windows", 0), ("recurrent", 1)])
def test_drafts_are_those_of_whole_passes(name, seed):
    """Depths read true tokens and states wherever these are known, also where they had read refused drafts before."""
    on = loaded(name, 2, seed)
    answers, made = complete(on, PROMPTS[1:])
    del made.counts[0]
    assert made.counts == foretell(on, answers) and len(made.counts) > 1


def test_a_kernel_reads_the_cache_a_token_at_a_time(monkeypatch):
    on, wanted = loaded("windows", 2), answer_without("windows", Picking(), ())
    for part, function in ((decode, "attend"), (rotation, "forward")):
        monkeypatch.setattr(part, function, functools.partial(getattr(part, function), interpret=True))
    engines = dataclasses.replace(on.ex.engines, by_kernels=True)
    answers, made = complete(on, ex=dataclasses.replace(on.ex, engines=engines))
    assert answers == wanted
    check_passes(answers, made)


@pytest.fixture(scope="module")
def run_dir(home, tiny):
    """A run with two depths, of a text that repeats itself."""
    (home / "refrain.txt").write_text("the same line again and again, over and over.\n" * 400)
    ran(*tiny, "--data.paths", json.dumps([str(home / "refrain.txt")]), "--model.mtp_layers=2", "--training.steps=60",
        "--training.mtp_weight=0.5", "--optimizer.learning_rate=0.01", "--model.compute_dtype=float32",
        "--validation.every=0", "--run.dir", home / "refrain")
    return home / "refrain"


def test_the_command_tells_how_many_tokens_a_pass_gives(run_dir):
    asked = run_dir, "--prompt=the same", "--max-tokens=60", "--json", "--mesh.tensor=1"
    plain, drafted = call(generate.main, *asked), call(generate.main, *asked, "--draft=2")
    assert (drafted.code, drafted.out) == (0, plain.out) and "drafts" not in plain.err
    told = re.search(r"drafts: (\S+) tokens per pass of a sequence; accepted (\d+)% of depth 1, (\d+)% of depth 2\n",
                     drafted.err)
    tokens, *shares = map(float, told.groups())
    assert tokens > 1.5 and 100 >= shares[0] >= shares[1] > 0
    assert tokens == pytest.approx(1 + sum(shares) / 100, abs=0.02)
    eight = ("--mesh.data=2", "--mesh.fsdp=2", "--mesh.tensor=2")
    assert call(generate.main, *asked[:-1], "--draft=1", *eight).out == plain.out


@pytest.mark.parametrize("drafts, told", [
    ("3", "--draft 3 needs as many depths of multi-token prediction, but the model in {run} has 2 that can draft; use "
          "--draft 2"),
    ("x", "is not a whole number")], ids=["more", "no number"])
def test_drafts_of_depths_that_a_run_has_not_are_refused(run_dir, drafts, told):
    refused(call(generate.main, run_dir, "--prompt=a", f"--draft={drafts}"), told.format(run=run_dir))


def test_what_stays_of_a_pass_are_the_states_up_to_its_last_token_that_was_right():
    """Two slots with states 0 to 3 of earlier passes, and 4 to 6 of the last one, of which three and one stay."""
    recent, after = np.arange(4.0)[None, None, :, None], np.arange(4.0, 7)[None, :, None]
    both = lambda a, axis: jnp.asarray(np.concatenate([a, 10 + a], axis))
    cache, ((kept,),) = passes.keep(["others", ((both(recent, 1),),)], both(after, 0), jnp.array([3, 1]))
    assert cache == "others" and kept[0, :, :, 0].tolist() == [[3, 4, 5, 6], [11, 12, 13, 14]]


def test_folders_without_depths_cannot_draft():
    refused(call(generate.main, GOLDENS / "llama3.2", "--prompt-ids=[[5, 6]]", "--draft=1"),
            "has 0 that can draft; use --draft 0")
