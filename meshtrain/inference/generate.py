"""Generation: prefill, then one token at a time until every row has stopped.

Two programs: `start` takes the prompts and picks their first tokens; `go_on` loops on the device for as many tokens as
the host asks. Between calls the host streams tokens and looks for stop strings. A row's random draws depend on the
seed, its prompt and its length, not on other rows, their number or the mesh.
"""
from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from meshtrain.inference import cache, sampling
from meshtrain.model.layers import Execution
from meshtrain.model.transformer import Transformer

MOST_ROWS = 32      # prompts that are answered together
PROMPT_STEP = 32    # prompts are padded to a multiple: few programs
STRIDE = 16         # tokens between two looks of the host, where it wants to see them as they come


class Going(NamedTuple):
    """The carry of `go_on`. count: tokens picked so far; a row that stopped earlier has its own count_B."""
    count: jax.Array
    token_B: jax.Array      # the last one, which no layer has seen yet
    out_BT: jax.Array
    count_B: jax.Array
    done_B: jax.Array
    caches: list


@dataclasses.dataclass(frozen=True)
class Completion:
    """prompt, tokens: ids, the stop token included. stopped: "stop" or "length"."""
    prompt: list[int]
    tokens: list[int]
    stopped: str


@dataclasses.dataclass(frozen=True)
class GenerationLimits:
    """tokens: maximum of new ones. stop_ids: stop tokens. length: maximum of prompt and answer together; 0: none.
    ended: (row, its tokens) -> number of them in the answer, where a stop string has ended it, else None; called every
    STRIDE tokens."""
    tokens: int
    stop_ids: tuple[int, ...] = ()
    length: int = 0
    ended: Callable[[int, list[int]], int | None] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Generator:
    """A model with its weights on the mesh that is in context. compiled: (name, jitted, its arguments) -> the compiled
    function."""
    model: Transformer
    ex: Execution
    params: dict
    compiled: Callable = lambda name, jitted, *args: jitted

    def complete(self, prompts: Sequence[Sequence[int]], limits: GenerationLimits,
                 how: sampling.Picking = sampling.Picking(), seed: int = 0,
                 tell: Callable[[int, list[int]], None] | None = None) -> list[Completion]:
        """The completions of non-empty prompts, in their order. tell: called with a prompt's number and its tokens so
        far."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        found: dict[int, Completion] = {}
        for at in range(0, len(order), MOST_ROWS):
            rows = order[at:at + MOST_ROWS]
            found |= zip(rows, self._together([prompts[i] for i in rows], rows, limits, how, seed, tell), strict=True)
        return [found[i] for i in range(len(prompts))]

    def _together(self, prompts, numbers, limits: GenerationLimits, how, seed: int, tell) -> list[Completion]:
        num_shards = self.ex.layout.num_shards(self.ex.layout.batch_axes)
        # Two rows at least: XLA makes a slice of a lookup by one id, and to slice a table that is split it gathers all
        # of it.
        B = max(-(-len(prompts) // num_shards) * num_shards, 2)
        T = -(-max(map(len, prompts)) // PROMPT_STEP) * PROMPT_STEP
        prompt_BT, lengths_B = np.zeros((B, T), np.int32), np.ones(B, np.int32)
        budget_B, names_B = np.zeros(B, np.int32), np.zeros(B, np.uint32)
        for i, prompt in enumerate(prompts):
            prompt_BT[i, T - len(prompt):], lengths_B[i] = prompt, len(prompt)
            # The last token is told and never read: it needs no position.
            budget_B[i] = min(limits.tokens, limits.length - len(prompt) + 1 if limits.length else limits.tokens)
            names_B[i] = zlib.crc32(np.asarray(prompt, "<i4").tobytes())
        room = int(budget_B.max())
        shared = (lengths_B, budget_B, names_B, np.uint32(seed))
        programs = _programs(self.model, self.ex, T, room, how, tuple(limits.stop_ids))
        first = (self.params, prompt_BT, *shared)
        going = self.compiled("the reading of prompts", programs[0], *first)(*first)
        ended_B = np.zeros(B, bool)
        go_on = self.compiled("the making of tokens", programs[1], self.params, going, *shared, np.int32(0), ended_B)
        stride = STRIDE if tell or limits.ended else room
        answers: list[list[int]] = [[] for _ in prompts]
        while True:
            out_BT, count_B, done_B, count = (
                np.asarray(x) for x in (going.out_BT, going.count_B, going.done_B, going.count))
            for i, number in enumerate(numbers):
                if not ended_B[i]:
                    answers[i] = out_BT[i, :count_B[i]].tolist()
                    kept = limits.ended(number, answers[i]) if limits.ended else None
                    if kept is not None:
                        answers[i], ended_B[i] = answers[i][:kept], True
                    if tell:
                        tell(number, answers[i])
            if (done_B | ended_B).all():
                break
            going = go_on(self.params, going, *shared, np.int32(count + stride), ended_B)
        stopped = [ended or bool(answer) and answer[-1] in limits.stop_ids for ended, answer in zip(ended_B, answers)]
        return [Completion(list(map(int, prompt)), answer, "stop" if one else "length")
                for prompt, answer, one in zip(prompts, answers, stopped, strict=True)]


@functools.lru_cache(maxsize=16)
def _programs(model: Transformer, ex: Execution, T: int, room: int, how: sampling.Picking, stop_ids: tuple[int, ...]):
    """(start, go_on), jitted, for prompts of T tokens and `room` more.

    start(params, prompt_BT, lengths_B, budget_B, names_B, seed) -> Going. go_on(params, going, lengths_B, budget_B,
    names_B, seed, until, ended_B) -> going, of `until` tokens or of those at which every row is done; `going` is
    donated. What the host reads lies whole on every device.
    """
    def whole(going: Going) -> Going:
        told = {name: jax.lax.with_sharding_constraint(x, P())
                for name, x in going._asdict().items() if name != "caches"}
        return going._replace(**told)

    def picked(going: Going, logits_BV, budget_B, names_B, seed) -> Going:
        """Adds one token to each row that is not done."""
        key = jax.random.fold_in(jax.random.key(seed), going.count)
        token_B = sampling.pick(how, logits_BV, jax.vmap(lambda name: jax.random.fold_in(key, name))(names_B))
        out_BT = jax.lax.dynamic_update_slice_in_dim(
            going.out_BT, jnp.where(going.done_B, 0, token_B)[:, None], going.count, 1)
        count_B = going.count_B + ~going.done_B
        stopped_B = (token_B[:, None] == jnp.asarray(stop_ids or (-1,), jnp.int32)).any(-1)
        done_B = going.done_B | (count_B >= budget_B) | stopped_B
        return going._replace(count=going.count + 1, token_B=token_B, out_BT=out_BT, count_B=count_B, done_B=done_B)

    def start(p, prompt_BT, lengths_B, budget_B, names_B, seed):
        B = prompt_BT.shape[0]
        index_BT = jnp.broadcast_to(jnp.arange(T), (B, T))
        pad_B1 = (T - lengths_B)[:, None]
        batch = {"tokens": prompt_BT, "segments": (index_BT >= pad_B1).astype(jnp.int32), "index": index_BT,
                 "positions": jnp.maximum(index_BT - pad_B1, 0), "sequence": jnp.zeros(B, jnp.int32)}
        x_BTD, caches = cache.prefill(model, ex, p, batch, room)
        zeros_B = jnp.zeros(B, jnp.int32)
        going = Going(jnp.int32(0), zeros_B, jnp.zeros((B, room), jnp.int32), zeros_B, budget_B <= 0, caches)
        return whole(picked(going, model.head_logits(ex, p, x_BTD[:, T - 1:])[:, 0], budget_B, names_B, seed))

    def go_on(p, going: Going, lengths_B, budget_B, names_B, seed, until, ended_B):
        def one_more(going: Going) -> Going:
            token_B1 = going.token_B[:, None]
            before = going.count - 1      # of the row's own tokens, those that the layers have seen
            # A row that is done goes on as padding: no expert works for it.
            segments_B1 = (~going.done_B)[:, None].astype(jnp.int32)
            batch = {"tokens": token_B1, "positions": lengths_B[:, None] + before, "segments": segments_B1,
                     "index": jnp.zeros_like(token_B1), "sequence": jnp.zeros_like(going.token_B)}
            x_BTD, caches = cache.extend(model, ex, p, batch, going.caches, T + before, T - lengths_B)
            return picked(going._replace(caches=caches), model.head_logits(ex, p, x_BTD)[:, 0], budget_B, names_B, seed)
        unfinished = lambda going: (going.count < until) & ~going.done_B.all()
        return whole(jax.lax.while_loop(unfinished, one_more, going._replace(done_B=going.done_B | ended_B)))

    return jax.jit(start), jax.jit(go_on, donate_argnums=1)
