"""Sequences in slots: what a sample draws is what one row alone would draw, whatever is beside it, before it and on
which mesh."""
import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sampling as cells

from meshtrain import config, trained
from meshtrain.inference import cache, passes, placement
from meshtrain.inference import generate as inference
from meshtrain.inference.generate import GenerationLimits
from meshtrain.inference.sampling import Picking, key
from meshtrain.model import transformer
from meshtrain.sharding.mesh import MeshSpec

VOCAB, STOPS = 97, tuple(range(4))
# Windows shorter than the sequences, and than a block; more query heads than kv heads, which tensor=2 does not divide.
MODEL = dict(vocab_size=VOCAB, embed_dim=24, num_layers=4, num_heads=6, num_kv_heads=3, head_dim=8, mlp_dim=40,
             mixers="WF", window=20, compute_dtype="float32")
EXPERTS = MODEL | dict(mlps="de", num_experts=4, experts_per_token=2, expert_mlp_dim=16)
TAU = 0.9


@functools.cache
def loaded(experts: bool = False, dtype: str = "float32", **sizes) -> trained.LoadedModel:
    """With a head whose logits reach 10."""
    run = config.Run(model=(EXPERTS if experts else MODEL) | dict(compute_dtype=dtype))
    model, spec = transformer.build(run.model), MeshSpec(sizes)
    mesh, layout = spec.build(jax.devices()[:int(np.prod(list(sizes.values()) or [1]))]), None
    layout = placement.command(model, spec.sizes)
    with jax.set_mesh(mesh):
        params = jax.jit(model.init)(jax.random.key(0))
        params["head"] = jax.tree.map(lambda w: 3 * w, params["head"])
        return trained.LoadedModel(model, mesh, trained.execution(run, model, layout, mesh), params,
                                   trained.Compiler(mesh, {}))


def complete(on: trained.LoadedModel, prompts, most: int, seed: int = 3, slots: int = 8, how=Picking(TAU), **more):
    with jax.set_mesh(on.mesh), jax.default_matmul_precision("highest"):
        made = dataclasses.replace(on.generator(), slots=slots)
        return made.complete(prompts, GenerationLimits(most, STOPS), how, seed, **more)


def drawn_prompts(count: int, seed: int = 0):
    """(prompts of 1 to 60 tokens, the samples of each, their counters)."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(6, VOCAB, rng.integers(1, 60)).tolist() for _ in range(count)]
    return prompts, rng.integers(1, 4, count).tolist(), [(7, int(row)) for row in rng.permutation(count)]


@functools.cache
def _whole(experts: bool, T: int):
    on = loaded(experts)

    @jax.jit
    def logits(params, tokens_BT):
        index = jnp.broadcast_to(jnp.arange(T), tokens_BT.shape)
        batch = dict(tokens=tokens_BT, segments=jnp.ones_like(index), index=index, positions=index,
                     sequence=jnp.arange(len(tokens_BT)))
        x_BTD = on.model.through_layers(on.ex, params, batch)
        return on.model.head_logits(on.ex, params, x_BTD)
    return logits


def whole_passes(answers, experts: bool = False) -> np.ndarray:
    """The logits [answers, T, V] of a pass over each whole sequence, a row at a time on one device."""
    T = 64 * -(-max(len(one.prompt) + len(one.tokens) for one in answers) // 64)
    rows = np.zeros((len(answers), T), np.int32)
    for row, one in zip(rows, answers):
        row[:len(one.prompt) + len(one.tokens)] = one.prompt + one.tokens
    on = loaded(experts)
    with jax.set_mesh(on.mesh), jax.default_matmul_precision("highest"):
        return np.concatenate([_whole(experts, T)(on.params, part) for part in np.split(rows, len(rows))])[..., :VOCAB]


def check(answers, samples, counters, most: int, seed: int = 3, experts: bool = False, most_others: int = 1) -> int:
    """Each token is the one that a whole pass and the key of its counters give, with that log-probability and margin,
    but in `most_others` answers, at draws whose margin is below the rounding of two programs. -> how many tokens."""
    logits = whole_passes(answers, experts)
    ids = [(*counters[i], j) for i, count in enumerate(samples) for j in range(count)]
    assert len(ids) == len(answers)
    count, others = 0, set()
    for (batch, row, sample), one, z in zip(ids, answers, logits):
        at = np.arange(len(one.prompt), len(one.prompt) + len(one.tokens))
        count += len(at)
        z = z[at - 1] / TAU
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key(seed, batch, row, sample), at)
        noisy = z + np.asarray(jax.vmap(lambda k: jax.random.gumbel(k, (VOCAB,), mode="high"))(keys))
        second, best = np.sort(noisy, -1)[:, -2:].T
        bound = 2e-6 * np.abs(z).max()     # float32, of two programs
        for i, token in enumerate(one.tokens):
            if noisy[i].argmax() != token:
                assert best[i] - second[i] < 2 * bound, (one, i)
                assert one.margins[i] < 2 * bound
                others.add((row, sample))
        logprobs = z[range(len(at)), one.tokens] - np.log(np.exp(z.astype(np.float64)).sum(-1))
        np.testing.assert_allclose(one.logprobs, logprobs, atol=5 * bound)
        np.testing.assert_allclose(one.margins, best - second, atol=5 * bound)
        ended = one.tokens[-1] in STOPS
        assert not set(STOPS) & set(one.tokens[:-1]) and one.stopped == ("stop" if ended else "length")
        assert ended or len(one.tokens) == most
    assert len(others) <= most_others, others
    return count


MESHES = [{}, dict(data=2), dict(tensor=2), dict(fsdp=2), dict(data=2, fsdp=2, tensor=2)]


@pytest.mark.parametrize(("sizes", "slots"), [
    (dict(data=2, fsdp=2, tensor=2), 8), *(pytest.param({}, slots, marks=cells.GRID) for slots in (4, 64)),
    *(pytest.param(sizes, 16, marks=cells.GRID) for sizes in MESHES)])
def test_refilled_slots_draw_what_a_row_alone_draws(sizes, slots):
    prompts, samples, counters = drawn_prompts(24)
    answers = complete(loaded(**sizes), prompts, 70, slots=slots, samples=samples, counters=counters)
    assert check(answers, samples, counters, 70) > 500
    assert len({len(one.tokens) for one in answers}) > 10, "they end at different times"


@pytest.mark.long
@pytest.mark.parametrize(("sizes", "slots", "stride"), [
    ({}, 4, 64), ({}, 64, 1), *((sizes, slots, stride) for sizes, slots, stride in zip(MESHES, (
        16, 64, 16, 32, 16), (16, 64, 1, 16, 64)))])
def test_a_thousand_rollouts_draw_what_rows_alone_draw(sizes, slots, stride, monkeypatch):
    """Of 1 to 200 tokens, looked at by the host every `stride` tokens. By the margins, a tenth of an answer may differ.
    """
    monkeypatch.setattr(inference, "STRIDE", stride)
    tell = (lambda *_: None) if stride < inference.LONGEST_STRIDE else None
    prompts, _, counters = drawn_prompts(500)
    answers = complete(loaded(**sizes), prompts, 200, slots=slots, samples=[2] * 500, counters=counters, tell=tell)
    assert check(answers, [2] * 500, counters, 200, most_others=3) > 20_000
    lengths = [len(one.tokens) for one in answers]
    assert min(lengths) == 1 and max(lengths) > 150


@pytest.mark.parametrize("sizes", [{}, pytest.param(dict(data=2, tensor=2), marks=cells.GRID)])
def test_experts_too(sizes):
    prompts, samples, counters = drawn_prompts(6)
    answers = complete(loaded(True, **sizes), prompts, 40, slots=4, samples=samples, counters=counters)
    check(answers, samples, counters, 40, experts=True)


@pytest.mark.parametrize("sizes", [{}, dict(data=2, tensor=2), dict(dtype="bfloat16")])
def test_bits_do_not_depend_on_neighbours_order_or_the_hosts_looks(sizes):
    prompts, samples, counters = drawn_prompts(12)
    prompts[4] = list(range(10, 70))        # the longest: the room stays what it was
    on = loaded(**sizes)
    answers = complete(on, prompts, 40, slots=4, samples=samples, counters=counters)
    wanted, firsts = dict(enumerate(answers)), np.cumsum([0, *samples])
    chosen = [9, 4, 2, 0]
    assert sum(samples[i] for i in chosen) > 4
    again = complete(on, [prompts[i] for i in chosen], 40, slots=4, samples=[samples[i] for i in chosen],
                     counters=[counters[i] for i in chosen], tell=lambda *_: None)
    for one, number in zip(again, [firsts[i] + j for i in chosen for j in range(samples[i])], strict=True):
        assert dataclasses.asdict(one) == dataclasses.asdict(wanted[number])


def test_the_key_of_a_sample_folds_batch_row_and_sample_in_this_order():
    """Samplers of another version, and runs that go on with one, draw the same."""
    wanted = jax.random.key(5)
    for counter in (7, 2, 3):
        wanted = jax.random.fold_in(wanted, counter)
    assert jax.random.key_data(key(5, 7, 2, 3)).tolist() == jax.random.key_data(wanted).tolist()


def test_a_prompt_is_read_once_for_its_samples_which_differ():
    read = []

    def compiled(name, jitted, *args):
        if name != "the reading of prompts":
            return jitted
        return lambda *args: read.append(int((args[2].read_P > 0).sum())) or jitted(*args)
    on = loaded()
    with jax.set_mesh(on.mesh):
        answers = inference.Generator(on.model, on.ex, on.params, compiled).complete(
            [[7, 8, 9], [9, 8, 7], [7, 8, 9]], GenerationLimits(12), Picking(1.0), samples=[8, 4, 1])
    assert sum(read) == 3
    assert len({tuple(one.tokens) for one in answers[:8]}) == 8 == len({tuple(one.tokens) for one in answers[4:12]})
    assert answers[12] == answers[0], "the same prompt draws the same, unless it is told other counters"


def test_slots_are_busy_until_prompts_run_out(monkeypatch):
    """By the host's dealing alone, with programs that only count: lengths are geometric, as of one stop probability.
    Passes are those of rows that begin and end together, less the ones that refilling saves."""
    S, rng, lengths, passes = 64, np.random.default_rng(0), [], []

    def fill(_, slots, filling, seed):
        new_S = filling.source_S >= 0
        lengths.extend(np.minimum(rng.geometric(0.01, new_S.sum()), 800))
        slots.at_S[new_S], slots.done_S[new_S] = lengths[-new_S.sum():], False
        return slots

    def decode(_, slots, free_S, until, enough):
        steps, token_SU, done_S = 0, np.full((S, inference.LONGEST_STRIDE), -1), slots.done_S | free_S
        while steps < until and done_S.sum() < enough:
            token_SU[~done_S, steps] = 1
            passes.append((enough < S, (~done_S).mean()))
            slots.at_S[~done_S] -= 1
            done_S, steps = done_S | (slots.at_S == 0), steps + 1
        return slots._replace(done_S=done_S), inference.Drawn(steps, token_SU, 0.0 * token_SU, 0.0 * token_SU)
    nobody = inference.SlotStates(None, np.zeros(S, int), None, None, None, np.ones(S, bool), [])
    monkeypatch.setattr(inference, "_programs", lambda *_: inference._Programs(lambda _: nobody, fill, decode))
    ex = SimpleNamespace(layout=SimpleNamespace(batch_axes=(), num_shards=lambda axes: 1))
    model = SimpleNamespace(cfg=config.Model(max_seq_len=1000))
    made = inference.Generator(model, ex, {}, slots=S)
    answers = made.complete([[7, 8]] * 128, GenerationLimits(800), samples=[8] * 128)
    assert sorted(len(one.tokens) for one in answers) == sorted(lengths) and len(lengths) == 1024
    assert np.mean([busy for waiting, busy in passes if waiting]) > 0.9
    assert sum(max(lengths[i:i + S]) for i in range(0, 1024, S)) > 2.5 * len(passes)


def test_draws_of_samples_have_the_probabilities_of_the_logits():
    """And those of one sample say nothing about the next."""
    on, count = loaded(), 3000
    answers = complete(on, [[11, 12, 13]], 1, slots=512, how=Picking(1.0), samples=[count])
    z = whole_passes(answers[:1])[0, 2].astype(np.float64)
    p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
    found = np.bincount([one.tokens[0] for one in answers], minlength=VOCAB)
    common = p * count >= 5
    assert common.sum() > 5
    expected = np.append(p[common], p[~common].sum()) * count
    off = (np.append(found[common], found[~common].sum()) - expected) ** 2 / expected
    free = len(off) - 1
    assert off.sum() < free + 4 * (2 * free) ** 0.5 + 5, "chi-squared, beyond four deviations"
    first = np.array([one.tokens[0] for one in answers]) == found.argmax()
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 4 / count ** 0.5


def test_layers_with_a_window_keep_what_it_sees_and_no_more():
    on = loaded()
    room = cache.round_room(300)
    caches = passes.empty(on.model, on.ex, on.params, 4, room)
    assert [[x.shape for x in layer] for layer in caches[0]] == [[(2, 4, 3, 64, 8)] * 2, [(2, 4, 3, room, 8)] * 2]
    assert cache.slot_bytes(on.model.cfg, room, 4) == sum(
        x.size * 4 // 4 for layer in caches[0] for x in layer)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 511, 513, 1000, 1025, 5000, 40_000])
def test_a_room_is_whole_blocks(tokens):
    room = cache.round_room(tokens)
    block = cache._block(room)
    assert room >= tokens and room % block == 0 and room // block <= cache.MOST_BLOCKS and room - tokens < block
    assert cache.round_room(room) == room


def test_prompts_of_one_token_and_budgets_of_none():
    on = loaded()
    with jax.set_mesh(on.mesh):
        made = on.generator()
        answers = made.complete([[7], list(range(6, 26)), [8, 9]], GenerationLimits(3, length=20))
    assert [(len(one.tokens), one.stopped) for one in answers] == [(3, "length"), (1, "length"), (3, "length")]
    assert [len(one.logprobs) for one in answers] == [3, 1, 3]


@pytest.mark.parametrize("model", [MODEL, MODEL | dict(mixers="GF", linear=dict(key_heads=3, value_heads=6, key_dim=8,
                                                                                value_dim=4, conv_width=3))])
def test_tensor_need_not_divide_the_key_heads(model):
    """Nor the key heads of a recurrent mixer, whose value heads must lie with them: passes over whole sequences, too."""
    run, logits = config.Run(model=model), []
    built = transformer.build(run.model)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 30))
    index = np.broadcast_to(np.arange(30), tokens.shape)
    batch = dict(tokens=tokens, segments=np.ones_like(tokens), index=index, positions=index, sequence=np.arange(2))
    for sizes in ({}, dict(tensor=2)):
        spec = MeshSpec(sizes)
        mesh, layout = spec.build(jax.devices()[:max([*sizes.values(), 1])]), placement.command(built, spec.sizes)
        with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
            ex = trained.execution(run, built, layout, mesh)
            params = jax.jit(built.init)(jax.random.key(0))
            x_BTD = jax.jit(lambda p: built.through_layers(ex, p, jax.tree.map(jnp.asarray, batch)))(params)
            logits.append(np.asarray(x_BTD))
    np.testing.assert_allclose(*logits, atol=1e-4)
