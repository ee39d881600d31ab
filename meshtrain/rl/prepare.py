"""Opens the prompts of a run that samples answers, and makes its feed, with samplers and reference model."""
from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from meshtrain import assembly, files, starts
from meshtrain.checkpoint import resume
from meshtrain.checkpoint.checkpoint import Checkpoints
from meshtrain.checkpoint.directory import DirectoryStore
from meshtrain.cluster import agree
from meshtrain.config import ConfigError, Run, user_errors
from meshtrain.data import sources
from meshtrain.data.documents.tokenizer import Tokenizer
from meshtrain.huggingface.weights.ends import Ends
from meshtrain.inference.detokenizer import Words
from meshtrain.model import params as model_params
from meshtrain.rl import exchange, prompts, rollouts, samplers, sync
from meshtrain.rl.groups import KeptBatches
from meshtrain.rl.orders import Orders, SentWeights
from meshtrain.rl.prompts import Prompts
from meshtrain.rl.rewards.workers import RewardWorkers
from meshtrain.rl.rollouts import Reference, Rollouts
from meshtrain.rl.samplers import Sampler
from meshtrain.run import replicas, rundir, say
from meshtrain.storage import model_folder
from meshtrain.training.state import State
from meshtrain.units import amount


def open_prompts(run: Run, directory: Path, start: resume.Start) -> tuple[sources.Corpus, Prompts]:
    """Open the prompts of a run, and check that their answers fit into its batches. Raises: ConfigError."""
    data = run.data
    with user_errors():
        corpus, opened = prompts.open_prompts(
            data, vocab_size=run.model.vocab_size, seed=run.run.seed, longest=data.seq_len - run.rl.max_tokens + 1,
            folders=model_folder.companion_folders(run.run.dir, run.checkpoint.init_from))
    resume.check_tokenizer(run, start, corpus.tokenizer)
    resume.check_data(run, start, corpus.fingerprint)
    resume.check_prompts(run, start, opened.digest)
    rollouts.check(run, opened)
    for note in sources.notes(corpus.tokenizer, run.model.vocab_size):
        say.out(f"note: {note}")
    say.out(f"{amount(len(opened.prompts), 'prompt')} to train on, {len(opened.held)} held out, of up to "
            f"{opened.longest} tokens")
    return corpus, opened


def feed_of(made: assembly.Assembly, start: resume.Start, state: State, asked: Prompts, tokenizer: Tokenizer,
            ends: Ends, directory: Path, check_claim: Callable[[], None]) -> Rollouts:
    """Return the feed that samples answers to prompts. All processes call it together.

    asked: the prompts. state: the state at `start`. ends: the ends of answers, to which rl.stop is added. directory:
    run.dir. check_claim: raises an error if another start has taken over run.dir. Raises: ConfigError.
    """
    run, rl = made.run, made.run.rl
    words = Words(tokenizer.decode, tuple(dict.fromkeys((*rl.stop, *ends.stops))), ends.ids, ends.describe(tokenizer))
    local = samplers.make(made, asked.longest_with_answer(rl.max_tokens))
    position = start.saved.metadata["data"]["position"] if start.saved else None
    kept = KeptBatches(run, asked, directory)
    rewards = RewardWorkers(rl.reward, rl.reward_workers, rl.reward_timeout_s, rl.reward_memory_gb, rl.reward_check)
    reference = _find_reference(made, start, state, (position or {}).get("origin"))
    sampler: Sampler = local
    if rl.lag:
        sent, frozen = _prepare_weights(made, directory, check_claim)
        sampler = Orders(run, asked, words, kept, local, sent, frozen, (position or {}).get("queue", ()))
    return Rollouts(made, asked, words, sampler, rewards, reference, kept, position)


def finish(run: Run, directory: Path) -> None:
    """Tell separate samplers that the run has all its steps and requests no further batch."""
    if run.rl.lag:
        agree.on_first(lambda: files.replace(exchange.SamplerFiles(directory).finished, ""))


def _find_reference(made: assembly.Assembly, start: resume.Start, state: State, saved: list | None) -> Reference:
    """Return the reference of rl.kl. saved: the origin in the checkpoint that the run resumes from. Raises: ConfigError
    if the weights that the run started from no longer exist."""
    run, divided = made.run, made.model.divide
    if run.lora.rank:
        if not run.rl.kl:
            return Reference(None, [])
        # each step donates the base model's buffers to the next one, so read them from the state
        zeros = jax.tree.map(jnp.zeros_like, divided(state.params)[0])
        return Reference(lambda params: model_params.join(zeros, divided(params)[1]), [])
    # Every checkpoint names the origin, because rl.kl may be set in a later start.
    origin: list = [replicas.digest(state.params), run.checkpoint.step] if start.saved is None else saved or []
    if run.rl.kl:
        first = starts.copy_first_params(made, start, state, origin[1] if origin else 0)
        digest = replicas.digest(first)
        if origin and origin[0] != digest:
            raise ConfigError(f"checkpoint.init_from={json.dumps(run.checkpoint.init_from)} has other weights than the "
                              f"run in {run.run.dir} started from (the reference of rl.kl); give the original weights, "
                              "or another run.name")
        return Reference(lambda _: first, origin or [digest, 0])
    return Reference(None, origin)


def _prepare_weights(made: assembly.Assembly, directory: Path, check_claim: Callable[[], None]
                  ) -> tuple[SentWeights, SentWeights | None]:
    """Return (the trained weights, the untrained ones with adapters or None) that samplers read."""
    run = made.run
    place, document = exchange.SamplerFiles(directory), rundir.metadata(run, made.layout.rules.text, {})
    checkpoints = functools.partial(Checkpoints, check_claim=check_claim)
    sent = SentWeights(checkpoints(DirectoryStore(place.weights), keep=run.rl.lag + 2), _cast(made), document)
    frozen = SentWeights(checkpoints(DirectoryStore(place.frozen), keep=1), _cast(made, frozen=True),
                         document) if run.lora.rank else None
    return sent, frozen


def _cast(made: assembly.Assembly, frozen: bool = False) -> Callable[[dict], dict]:
    """Return a function: all weights -> the trained (or frozen) ones, cast to the dtypes of samplers."""
    dtype = jnp.dtype(made.run.model.compute_dtype)

    def part(params: dict) -> dict:
        return made.model.divide(params)[1 if frozen else 0]
    if all(info.dtype == sync.read_dtype(info, dtype) for info in made.model.parameters() if info.trainable != frozen):
        return part         # no cast and no copy
    return jax.jit(lambda params: part(sync.cast(made.model, params, dtype)),
                   out_shardings=jax.tree.map(lambda leaf: leaf.sharding, part(made.state_shapes.params)))
