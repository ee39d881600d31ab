"""Generation in a fixed number of slots. Each slot holds one sequence; when the sequence has ended, the next sequence
gets the slot.

There are two programs. `fill` reads prompts, each once for all of its samples that get a slot, and samples nothing.
`decode` loops on the device and computes a token for every slot; its first input is the last token of the prompt.
Between calls the host streams tokens, looks for stop strings and assigns slots. The tokens of a sample depend on the
seed, its prompt, its number among the prompt's samples and the position. They do not depend on other slots, the number
of slots, the order or the mesh.

For longrope in a model folder the length of a sequence determines the frequencies (`rope.turns`), as in transformers.
When an answer crosses the original length, its tokens are read again with the new frequencies, and the answer then
continues with the new frequencies.

With N drafts, depths of MTP draft the next N tokens, and a pass of the model over the last token and these drafts
chooses N + 1 tokens from its own logits. A chosen token stays if all chosen tokens before it equal their drafts. Drafts
are also chosen with the keys of their positions, so that drafts often equal sampled tokens (arXiv:2408.07978).
"""
from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from meshtrain.inference import cache, passes, sampling
from meshtrain.model import rope
from meshtrain.model.execution import Execution
from meshtrain.model.transformer import Transformer
from meshtrain.names import PRNG

SLOTS = 32              # sequences that are continued together
STRIDE = 16             # tokens between two calls of the host, if it streams them or looks for stop strings
LONGEST_STRIDE = 64     # the same otherwise
PROMPT_STEP = 32        # prompts are padded to a multiple of this length
REFILLED = 8            # prompts are read when 1 of this many slots is done
PROMPTS = 2             # prompts that a shard of the batch reads together; constant, so that bits depend on no other


class SlotStates(NamedTuple):
    """The carry of `decode`.

    tokens_SW: the last token, at position at_S, which no layer has read yet; with N drafts, preceded by the 2 N tokens
    before it. count_S: number of tokens of the last pass that stay. last_S: the position at which a sequence has its
    maximum length. key_S2: data of `sampling.key`. done_S: whether the slot's sequence has ended.
    """
    tokens_SW: jax.Array
    at_S: jax.Array
    count_S: jax.Array
    last_S: jax.Array
    key_S2: jax.Array
    done_S: jax.Array
    caches: list


class Drawn(NamedTuple):
    """The result of a call of `decode`. steps: number of passes. The other fields have, for each slot and pass, N + 1
    tokens (-1 for tokens that do not stay, and for slots that were done) and the numbers of `sampling.Draw`."""
    steps: jax.Array
    token_SU: jax.Array
    logprob_SU: jax.Array
    margin_SU: jax.Array


@dataclasses.dataclass(frozen=True)
class Completion:
    """An answer to a prompt. prompt, tokens: ids, including the stop token. stopped: "stop" or "length". logprobs,
    margins: for each token, see `sampling.Draw`."""
    prompt: list[int]
    tokens: list[int]
    stopped: str
    logprobs: list[float] = dataclasses.field(default_factory=list, compare=False)
    margins: list[float] = dataclasses.field(default_factory=list, compare=False)


@dataclasses.dataclass(frozen=True)
class GenerationLimits:
    """The conditions that end an answer.

    tokens: maximum of new tokens. stop_ids: stop tokens. length: maximum of prompt and answer together; 0: none. ended:
    (number of the completion, its tokens) -> number of tokens in the answer if a stop string has ended it, else None.
    It is called every STRIDE tokens.
    """
    tokens: int
    stop_ids: tuple[int, ...] = ()
    length: int = 0
    ended: Callable[[int, list[int]], int | None] | None = None

    def of(self, prompt: Sequence[int]) -> int:
        """Return the maximum of new tokens. The last token is returned but never read by the model, so it needs no
        position."""
        return min(self.tokens, self.length - len(prompt) + 1) if self.length else self.tokens


@dataclasses.dataclass(frozen=True, eq=False)
class Generator:
    """A model with its weights on the mesh that is in context.

    compiled: (name, jitted, its arguments) -> the compiled function. slots: maximum number of slots on all devices.
    room: minimum tokens of a slot, so that calls share their programs; the number of slots is then a power of two if it
    is below the maximum. kept: the programs, which Generators that differ only in their weights may share. drafts:
    number of depths of MTP that draft. counts: tokens of a slot in a pass -> number of such passes so far.
    """
    model: Transformer
    ex: Execution
    params: dict
    compiled: Callable = lambda name, jitted, *args: jitted
    slots: int = SLOTS
    room: int = 0
    kept: dict = dataclasses.field(default_factory=dict, repr=False)
    drafts: int = 0
    counts: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter, repr=False)

    def __post_init__(self):
        cache.check(self.model.cfg)

    def complete(self, prompts: Sequence[Sequence[int]], limits: GenerationLimits,
                 how: sampling.Picking = sampling.Picking(), seed: int = 0,
                 tell: Callable[[int, list[int]], None] | None = None,
                 samples: Sequence[int] | None = None,
                 counters: Sequence[tuple[int, int]] | None = None,
                 each: Callable[[int, Completion], None] | None = None) -> list[Completion]:
        """Return the completions of non-empty prompts: all samples of the first prompt, then of the second, and so on.

        samples: number for each prompt, default 1. tell: called with a completion's number and its tokens so far.
        counters: for each prompt, (batch, row) of `sampling.key`, uint32; default: 0 and a checksum of the prompt.
        each: called with a completion's number and the completion when it ends.
        """
        samples = [1] * len(prompts) if samples is None else samples
        counters = [(0, zlib.crc32(np.asarray(prompt, "<i4").tobytes())) for prompt in prompts
                    ] if counters is None else counters
        firsts = [0, *itertools.accumulate(samples)]
        requests = [_Request(firsts[i] + j, i, list(map(int, prompts[i])), limits.of(prompts[i]), (*counters[i], j))
                    for i in sorted(range(len(prompts)), key=lambda i: len(prompts[i])) for j in range(samples[i])]
        completions = [Completion(request.prompt, [], "length")
                       for request in sorted(requests, key=lambda request: request.number)]
        waiting = collections.deque(self._with_leg(request) for request in requests if request.budget > 0)
        for request in self._answer(waiting, limits, how, seed, tell):
            stopped = request.ended or request.tokens[-1] in limits.stop_ids
            completions[request.number] = Completion(request.prompt, request.tokens, "stop" if stopped else "length",
                                                     request.logprobs, request.margins)
            if each:
                each(request.number, completions[request.number])
        return completions

    def _answer(self, waiting: collections.deque[_Request], limits: GenerationLimits, how, seed: int, tell):
        """Yield each request when it ends."""
        if not waiting:
            return
        S = self.slots_for(1 << (len(waiting) - 1).bit_length() if self.room else len(waiting))
        ends = ((request.read + request.budget, _pad_length(request.read),
                 *map(_pad_length, request.turns_crossed(self._turns))) for request in waiting)
        room, T = cache.round_room(max(self.room, *map(max, ends)) + self.drafts), self.drafts + 1
        programs = _programs(self.model, self.ex, S, room, how, tuple(limits.stop_ids), self.drafts)
        run = functools.partial(self._run, (S, room, how, limits.stop_ids, self.drafts))
        slots = run("the allocation of the cache", programs.empty, self.params)
        owners: list[_Request | None] = [None] * S
        stride = np.int32(STRIDE if tell or limits.ended else LONGEST_STRIDE)
        while waiting or any(owners):
            while waiting and not all(owners):
                filling = _deal(waiting, owners, self._shards(), self.drafts)
                slots = run("the reading of prompts", programs.fill, self.params, slots, filling, np.uint32(seed))
            free_S = np.array([owner is None for owner in owners])
            enough = np.int32(max(S // REFILLED, 1) if waiting else S)
            slots, drawn = run("the generation of tokens", programs.decode, self.params, slots, free_S, stride, enough)
            steps, *numbers, done_S = map(np.asarray, (*drawn, slots.done_S))
            for s, owner in enumerate(owners):
                if owner is None:
                    continue
                stay_U = numbers[0][s, :steps * T] >= 0
                self.counts.update(stay_U.reshape(-1, T).sum(1).tolist())
                for so_far, new_SU in zip((owner.tokens, owner.logprobs, owner.margins), numbers):
                    so_far += new_SU[s, :steps * T][stay_U].tolist()
                kept = limits.ended(owner.number, owner.tokens) if limits.ended else None
                if kept is not None:
                    owner.ended = True
                    del owner.tokens[kept:], owner.logprobs[kept:], owner.margins[kept:]
                if tell:
                    tell(owner.number, list(owner.tokens))
                if owner.ended or done_S[s]:
                    owners[s] = None
                    if owner.ended or owner.read != owner.turn or owner.tokens[-1] in limits.stop_ids:
                        yield owner
                    else:
                        waiting.append(self._with_leg(owner))

    @functools.cached_property
    def _turns(self) -> tuple[int, ...]:
        return rope.turns(self.model.cfg)

    def _with_leg(self, request: _Request) -> _Request:
        """Return the request with the number of tokens until its frequencies change, or until its budget is used."""
        request.turn = min(request.turns_crossed(self._turns), default=0)
        request.leg = request.turn - request.read if request.turn else request.left
        return request

    def slots_for(self, count: int) -> int:
        """Return the number of slots for this many requests. The number is at least two: XLA turns a lookup by one id
        into a slice, and gathers a sharded table to slice it."""
        shards = self._shards()
        return max(-(-min(count, self.slots) // shards) * shards, 2)

    def programs(self, prompt: int) -> dict[str, jax.stages.Compiled]:
        """Return the compiled programs for all slots with `room`, from shapes alone: params may be ShapeDtypeStructs.
        prompt: number of tokens of a prompt."""
        S, room = self.slots_for(self.slots), cache.round_room(max(self.room, _pad_length(prompt - 1)) + self.drafts)
        jitted = _programs(self.model, self.ex, S, room, sampling.Picking(1.0), (), self.drafts)
        empty = self.compiled("the allocation of the cache", jitted.empty, self.params)
        slots = jax.tree.map(lambda a, placed: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=placed),
                             jax.eval_shape(jitted.empty, self.params), empty.output_shardings)
        request = _Request(0, 0, [0] * prompt, 1, (0, 0, 0), leg=1)
        filling = _deal(collections.deque([request]), [None] * S, self._shards(), self.drafts)
        return {"fill": self.compiled("the reading of prompts", jitted.fill, self.params, slots, filling, np.uint32(0)),
                "decode": self.compiled("the generation of tokens", jitted.decode, self.params, slots,
                                        np.zeros(S, bool), np.int32(1), np.int32(1))}

    def _shards(self) -> int:
        return self.ex.layout.num_shards(self.ex.layout.batch_axes)

    def _run(self, settings, name: str, jitted, *args):
        shapes = tuple(np.shape(x) for x in jax.tree.leaves(args[2:]))
        if (settings, name, shapes) not in self.kept:
            self.kept[settings, name, shapes] = self.compiled(name, jitted, *args)
        return self.kept[settings, name, shapes](*args)


@dataclasses.dataclass(eq=False)
class _Request:
    """One requested completion. of_prompt: the prompt's number. counters: (batch, row, sample). leg: tokens until its
    slot is done. turn: the length at which the request is read again; 0: none."""
    number: int
    of_prompt: int
    prompt: list[int]
    budget: int
    counters: tuple[int, int, int]
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    margins: list[float] = dataclasses.field(default_factory=list)
    ended: bool = False
    leg: int = 0
    turn: int = 0

    @property
    def so_far(self) -> list[int]:
        return self.prompt + self.tokens

    @property
    def read(self) -> int:
        """The number of tokens that `fill` reads: all tokens so far except the last."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def left(self) -> int:
        return self.budget - len(self.tokens)

    @property
    def source(self) -> tuple[int, ...]:
        """A key that is equal for requests that read the same tokens."""
        return (self.of_prompt, self.number) if self.tokens else (self.of_prompt,)

    def turns_crossed(self, turns: Sequence[int]) -> list[int]:
        """Return the lengths in `turns` that the sequence passes before its answer ends."""
        return [turn for turn in turns if self.read < turn < self.read + self.left]


class Filling(NamedTuple):
    """The input of `fill`.

    prompt_PT: prompts without their last tokens, padded on the left. read_P: their numbers of tokens. reach_P: the
    position of the last token of their slots. source_S: see `cache.lay`. The other fields have, for each slot, the
    prompt's length and last tokens, the maximum of new tokens, and the counters of its key.
    """
    prompt_PT: np.ndarray
    read_P: np.ndarray
    reach_P: np.ndarray
    source_S: np.ndarray
    length_S: np.ndarray
    tokens_SW: np.ndarray
    budget_S: np.ndarray
    counters_S3: np.ndarray


def _pad_length(length: int) -> int:
    """Return a padded length, so that prompts share a few lengths. Long prompts grow by at most a quarter."""
    step = max(PROMPT_STEP if length > PROMPT_STEP // 2 else PROMPT_STEP // 2, 1 << max(length.bit_length() - 3, 0))
    return max(-(-length // step), 1) * step


def _deal(waiting: collections.deque[_Request], owners: list[_Request | None], shards: int, drafts: int) -> Filling:
    """Take waiting requests, assign free slots of the shard with the most free slots, and read each prompt once. All
    requests have the same padded length, so that there are few compiled programs."""
    S = len(owners)
    free = [[s for s in range(S) if owners[s] is None and s * shards // S == shard] for shard in range(shards)]
    T = _pad_length(waiting[0].read)
    rows = min(PROMPTS, S // shards)
    source_S = np.full(S, -1, np.int32)
    (length_S, budget_S), tokens_SW = np.zeros((2, S), np.int32), np.zeros((S, 2 * drafts + 1), np.int32)
    filling = Filling(np.zeros((rows * shards, T), np.int32), *np.zeros((2, rows * shards), np.int32), source_S,
                      length_S, tokens_SW, budget_S, np.zeros((S, 3), np.uint32))
    used: list[dict] = [{} for _ in range(shards)]
    while waiting and _pad_length(waiting[0].read) == T:
        request = waiting[0]
        able = [shard for shard in range(shards)
                if free[shard] and (len(used[shard]) < rows or request.source in used[shard])]
        if not able:
            break
        shard = max(able, key=lambda shard: (request.source in used[shard], len(free[shard])))
        s, waiting_for = free[shard].pop(0), used[shard]
        source = waiting_for.setdefault(request.source, len(waiting_for))
        row, tokens = shard * rows + source, request.so_far
        filling.prompt_PT[row, T - request.read:], filling.read_P[row] = tokens[:-1], request.read
        filling.reach_P[row] = request.read + request.leg
        source_S[s], length_S[s], budget_S[s] = source, len(tokens), request.leg
        tokens_SW[s] = ([0] * 2 * drafts + tokens)[-2 * drafts - 1:]
        filling.counters_S3[s], owners[s] = request.counters, waiting.popleft()
    return filling


class _Programs(NamedTuple):
    """The jitted functions of generation.

    empty(params) -> slots that are done. fill(params, slots, filling, seed) -> slots. decode(params, slots, free_S,
    until, enough) -> (slots, drawn): it runs until `until` tokens, or until `enough` slots are done. slots are donated.
    Arrays that the host reads are replicated on every device.
    """
    empty: Callable
    fill: Callable
    decode: Callable


@functools.lru_cache(maxsize=16)
def _programs(model: Transformer, ex: Execution, S: int, room: int, how: sampling.Picking, stop_ids: tuple[int, ...],
              drafts: int) -> _Programs:
    T, W = drafts + 1, 2 * drafts       # tokens of a pass; positions at which depths run
    def whole(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, P())

    def pin(slots: SlotStates) -> SlotStates:
        return SlotStates(*map(whole, slots[:-1]), cache.constrain(ex.layout, slots.caches))

    def empty(p):
        zeros_S, zeros_SW = jnp.zeros(S, jnp.int32), jnp.zeros((S, W + 1), jnp.int32)
        caches = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), passes.empty(model, ex, p, S, room, drafts))
        return pin(SlotStates(zeros_SW, zeros_S, zeros_S, zeros_S, jnp.zeros((S, 2), jnp.uint32), jnp.ones(S, bool),
                              caches))

    def fill(p, slots: SlotStates, new: Filling, seed):
        B, T = new.prompt_PT.shape
        index_PT = jnp.broadcast_to(jnp.arange(T), (B, T))
        pad_P1 = T - new.read_P[:, None]
        batch = {"tokens": new.prompt_PT, "segments": (index_PT >= pad_P1).astype(jnp.int32), "index": index_PT,
                 "positions": jnp.maximum(index_PT - pad_P1, 0), "sequence": jnp.zeros(B, jnp.int32),
                 "length": jnp.broadcast_to(new.reach_P[:, None], (B, T))}
        prompts = passes.read(model, ex, p, batch, drafts)
        caches = cache.lay(ex.layout, slots.caches, prompts, new.source_S, jnp.maximum(new.length_S - 1, 0))
        keys_S2 = jax.vmap(lambda ids: jax.random.key_data(sampling.key(seed, *ids)))(new.counters_S3)
        new_S, at_S = new.source_S >= 0, new.length_S - 1
        begun = SlotStates(new.tokens_SW, at_S, jnp.zeros(S, jnp.int32), at_S + new.budget_S, keys_S2, ~new_S, [])
        chosen = [jnp.where(new_S.reshape(-1, *[1] * (old.ndim - 1)), now, old)
                  for now, old in zip(begun[:-1], slots[:-1], strict=True)]
        return pin(SlotStates(*chosen, caches))

    def decode(p, slots: SlotStates, free_S, until, enough):
        def goes_on(carry):
            slots, drawn = carry
            return (drawn.steps < until) & (slots.done_S.sum() < enough)

        def one_more(carry):
            slots, drawn = carry
            live_S1, at_S1, last_S1 = ~slots.done_S[:, None], slots.at_S[:, None], slots.last_S[:, None]

            def batch(tokens_ST: jax.Array, at_ST: jax.Array) -> dict[str, jax.Array]:
                # A slot that is done continues as padding, so that no expert computes for it.
                zeros_ST = jnp.zeros_like(at_ST)
                return {"tokens": tokens_ST, "positions": at_ST, "segments": zeros_ST + live_S1, "index": zeros_ST,
                        "sequence": zeros_ST[:, 0], "length": zeros_ST + last_S1}

            def pick(h_STD: jax.Array, first: int) -> sampling.Draw:     # the tokens at the positions from at_S + first
                logits_STV, at_ST = model.state_logits(ex, p, h_STD), at_S1 + first + jnp.arange(h_STD.shape[1])
                keys_S = jax.random.wrap_key_data(slots.key_S2, impl=PRNG)
                keys_ST = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(keys_S, at_ST)
                new = sampling.pick(how, logits_STV.reshape(-1, logits_STV.shape[-1]), keys_ST.reshape(-1))
                return sampling.Draw(*(x.reshape(at_ST.shape) for x in new))
            tokens_ST, caches = slots.tokens_SW, slots.caches
            if drafts:
                before = batch(tokens_ST, at_S1 + jnp.arange(-W, 0))
                tokens_ST, caches = passes.draft(model, ex, p, before, caches, pick)
            at_ST = at_S1 + jnp.arange(T)
            x_STD, caches = passes.extend(model, ex, p, batch(tokens_ST, at_ST), caches, slots.count_S)
            h_STD = model.final_state(ex, p, x_STD)
            new = pick(h_STD, 1)
            stops_ST = (new.token_B[..., None] == jnp.asarray(stop_ids or (-1,), jnp.int32)).any(-1)
            agrees_SN = (tokens_ST[:, 1:] == new.token_B[:, :-1]) & ~stops_ST[:, :-1] & (at_ST[:, 1:] < last_S1)
            stays_ST = jnp.cumprod(jnp.concatenate([live_S1, agrees_SN], 1), 1, jnp.int32) > 0
            count_S = stays_ST.sum(1, dtype=jnp.int32)
            drawn = Drawn(drawn.steps + 1, *(jax.lax.dynamic_update_slice_in_dim(
                out_SU, jnp.where(stays_ST, new_ST, none), drawn.steps * T, 1)
                for out_SU, new_ST, none in zip(drawn[1:], new, (-1, 0, 0), strict=True)))
            at_S = slots.at_S + count_S
            done_S = slots.done_S | (stays_ST & stops_ST).any(1) | (at_S >= slots.last_S)
            tokens_SW = jnp.take_along_axis(jnp.concatenate([slots.tokens_SW, new.token_B], 1),
                                            count_S[:, None] + jnp.arange(W + 1), 1)
            caches = passes.keep(caches, h_STD, count_S) if drafts else caches
            return pin(slots._replace(tokens_SW=tokens_SW, at_S=at_S, count_S=count_S, done_S=done_S,
                                      caches=caches)), drawn
        none_SU = jnp.zeros((S, LONGEST_STRIDE * T))
        drawn = Drawn(jnp.int32(0), none_SU.astype(jnp.int32) - 1, none_SU, none_SU)
        slots, drawn = jax.lax.while_loop(goes_on, one_more, (slots._replace(done_S=slots.done_S | free_S), drawn))
        return pin(slots), Drawn(*map(whole, drawn))

    return _Programs(jax.jit(empty), jax.jit(fill, donate_argnums=1), jax.jit(decode, donate_argnums=1))
