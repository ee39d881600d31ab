"""Opens the prompts of a run that samples answers. Makes its feed, with sampler, reference model and separate samplers.
"""
from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from meshtrain import assembly, starts
from meshtrain.checkpoint import resume
from meshtrain.checkpoint.checkpoint import Checkpoints
from meshtrain.checkpoint.directory import DirectoryStore
from meshtrain.config import ConfigError, Run, user_errors
from meshtrain.data import sources
from meshtrain.data.documents.tokenizer import Tokenizer
from meshtrain.huggingface.weights.ends import Ends
from meshtrain.inference.detokenizer import Words
from meshtrain.model import params as model_params
from meshtrain.rl import exchange, prompts, rollouts, samplers, sync
from meshtrain.rl.orders import Orders, SentWeights
from meshtrain.rl.prompts import Prompts
from meshtrain.rl.rollouts import Rollouts
from meshtrain.run import replicas, rundir, say
from meshtrain.storage import model_folder
from meshtrain.training.state import State
from meshtrain.units import counted


def open_prompts(run: Run, directory: Path, start: resume.Start) -> tuple[sources.Corpus, Prompts]:
    """Open the prompts of a run, and check that their answers fit into its batches. Raises: ConfigError."""
    data = run.data
    with user_errors():
        corpus, found = prompts.open_prompts(
            data, vocab_size=run.model.vocab_size, seed=run.run.seed, longest=data.seq_len - run.rl.max_tokens + 1,
            folders=model_folder.companion_folders(run.run.dir, run.checkpoint.init_from))
    resume.check_tokenizer(run, start, corpus.tokenizer)
    resume.check_data(run, start, corpus.fingerprint)
    resume.check_prompts(run, start, found.digest)
    rollouts.check(run, found)
    for note in sources.notes(corpus.tokenizer, run.model.vocab_size):
        say.out(f"note: {note}")
    say.out(f"{counted(len(found.prompts), 'prompt')} to train on, {len(found.held)} held out, of up to "
            f"{found.longest} tokens")
    return corpus, found


def feed_of(made: assembly.Assembly, start: resume.Start, state: State, asked: Prompts, tokenizer: Tokenizer,
            ends: Ends, directory: Path, check_claim: Callable[[], None]) -> Rollouts:
    """Return the feed that samples answers to prompts. All processes call it together.

    asked: the prompts. state: the state at `start`. ends: the ends of answers, to which rl.stop is added. directory:
    run.dir. check_claim: raises an error if another start has taken over run.dir. Raises: ConfigError.
    """
    run = made.run
    words = Words(tokenizer.decode, tuple(dict.fromkeys((*run.rl.stop, *ends.stops))), ends.ids)
    sampler = samplers.make(made, asked.longest_with_answer(run.rl.max_tokens))
    position = start.saved.metadata["data"]["position"] if start.saved else None
    feed = Rollouts(run, made.program, asked, words, sampler, directory, position)
    feed.ends = ends.shown(tokenizer)
    _set_reference(feed, made, start, state, (position or {}).get("origin"))
    if run.rl.lag:
        feed.orders = _orders(made, asked, words, (position or {}).get("queue", ()), directory, check_claim)
    return feed


def _set_reference(feed: Rollouts, made: assembly.Assembly, start: resume.Start, state: State,
                   saved: list | None) -> None:
    """Give the feed the reference of rl.kl and its origin. saved: the origin in the checkpoint that the run resumes
    from. Raises: ConfigError if the weights that the run started from no longer exist."""
    run, divided = made.run, made.model.divided
    if run.lora.rank:
        if run.rl.kl:       # each step donates the base model's buffers to the next one, so read them from the state
            zeros = jax.tree.map(jnp.zeros_like, divided(state.params)[0])
            feed.reference = lambda params: model_params.joined(zeros, divided(params)[1])
        return
    # Every checkpoint names the origin, because rl.kl may be set in a later start.
    feed.origin = [replicas.digest(state.params), run.checkpoint.step] if start.saved is None else saved or []
    if run.rl.kl:
        first = starts.copy_first_params(made, start, state, feed.origin[1] if feed.origin else 0)
        digest = replicas.digest(first)
        if feed.origin and feed.origin[0] != digest:
            raise ConfigError(f"checkpoint.init_from={json.dumps(run.checkpoint.init_from)} has other weights than "
                              f"those that the run in {run.run.dir} started from, the reference of rl.kl; give "
                              f"the original weights, or another run.name")
        feed.reference, feed.origin = lambda _: first, feed.origin or [digest, 0]


def _orders(made: assembly.Assembly, asked: Prompts, words: Words, queue: list, directory: Path,
            check_claim: Callable[[], None]) -> Orders:
    """Return the exchange with separate samplers. queue: see `Orders`."""
    run = made.run
    place, document = exchange.SamplerFiles(directory), rundir.metadata(run, made.layout.rules.text, {})
    checkpoints = functools.partial(Checkpoints, check_claim=check_claim)
    sent = SentWeights(checkpoints(DirectoryStore(place.weights), keep=run.rl.lag + 2), _cast(made))
    frozen = SentWeights(checkpoints(DirectoryStore(place.frozen), keep=1),
                         _cast(made, frozen=True)) if run.lora.rank else None
    return Orders(run, asked, words, sent, document, queue, frozen)


def _cast(made: assembly.Assembly, frozen: bool = False) -> Callable[[dict], dict]:
    """Return a function: all weights -> the trained (or frozen) ones, cast to the dtypes of samplers."""
    dtype = jnp.dtype(made.run.model.compute_dtype)

    def part(params: dict) -> dict:
        return made.model.divided(params)[1 if frozen else 0]
    if all(info.dtype == sync.read_dtype(info, dtype) for info in made.model.parameters() if info.trainable != frozen):
        return part         # no cast and no copy
    return jax.jit(lambda params: part(sync.cast(made.model, params, dtype)),
                   out_shardings=jax.tree.map(lambda leaf: leaf.sharding, part(made.state_shapes.params)))
