"""Opens the data that a run's objective trains on, and makes the feed of the training loop from it.

A kind of data is a row of KINDS. An objective names its kind in `training.objective`.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from meshtrain import assembly, config, teacher
from meshtrain.checkpoint import resume
from meshtrain.checkpoint.places import Places
from meshtrain.cluster import agree, watch
from meshtrain.config import ConfigError, Run
from meshtrain.data import sources
from meshtrain.data.batches import opened, packing, preferences
from meshtrain.data.batches.preferences import Pairs
from meshtrain.data.cache import parts
from meshtrain.data.documents.contracts import Batches
from meshtrain.data.documents.tokenizer import Tokenizer
from meshtrain.huggingface.weights import ends, pretrained
from meshtrain.huggingface.weights.ends import Ends
from meshtrain.huggingface.weights.pretrained import FolderWeights
from meshtrain.journal import goodput
from meshtrain.run import dpo_reference, phases, say
from meshtrain.run.feeds import BatchFeed
from meshtrain.run.loop import Feed
from meshtrain.starts import Beginning
from meshtrain.storage import copies, model_folder
from meshtrain.training import objective
from meshtrain.training.state import State

if TYPE_CHECKING:
    from meshtrain.rl.prompts import Prompts


@dataclasses.dataclass(frozen=True, eq=False)
class Opened:
    """A run on its devices with its data. corpus, data: the results of `DataKind.open`. directory: run.dir.
    check_claim: a function that raises an error if another start has taken over run.dir."""
    made: assembly.Assembly
    corpus: sources.Corpus
    data: Batches | Prompts
    ends: Ends
    directory: Path
    check_claim: Callable[[], None]
    account: goodput.Account


@dataclasses.dataclass(frozen=True)
class DataKind:
    """A kind of data. open: (run, run.dir, start) -> (corpus, batches from `start` on, or prompts). feed: (opened data,
    start, state at `start`) -> the feed of the training loop. finish: (run, run.dir), called when the run has taken and
    saved all its steps; None: nothing to do. All processes call each together."""
    open: Callable[[Run, Path, resume.Start], tuple[sources.Corpus, Batches | Prompts]]
    feed: Callable[[Opened, resume.Start, State], Feed]
    finish: Callable[[Run, Path], None] | None = None


def of_run(run: Run) -> DataKind:
    return KINDS[objective.of_run(run).data]()


def finish(run: Run, directory: Path) -> None:
    """End what the run's data needs until its last step. All processes call it together. directory: run.dir."""
    if end := of_run(run).finish:
        end(run, directory)


def check_source(run: Run) -> None:
    """Check that the run's objective can train on its data. Raises: ConfigError."""
    if run.data.source == "preferences" and objective.of_run(run).data != "pairs":
        raise ConfigError('data.source="preferences" has pairs of answers, which only training.objective="dpo" '
                          'supports; use this objective, or another source')


def open_run(beginning: Beginning, here: Places, account: goodput.Account) -> tuple[FolderWeights | None, Opened]:
    """Open the data of a run, and tokenize them if needed. Return (the model folder that a new run starts from, see
    `pretrained.open_folder`, or None; the opened data).

    All processes call this together. Raises: ConfigError.
    """
    made, start, run = beginning.made, beginning.start, beginning.made.run
    # tokenizing may take hours
    with account.count_as("data"), watch.phase("opening the data", watch.UNLIMITED), phases.phase("opening the data"):
        folder = None if start.saved else agree.everywhere(lambda: pretrained.open_folder(run, made.model))
        corpus, data = agree.everywhere(lambda: of_run(run).open(run, here.directory, start))
        with config.user_errors():
            of_answers = ends.agree_on(lambda: ends.of_run(run, beginning.origin))
            sample_prompt(run, corpus.tokenizer)        # reports a mistake before the first step
    say.out(f"answers end with {of_answers.describe(corpus.tokenizer)}")
    if of_answers.note:
        say.out(f"note: {of_answers.note}")
    agree.same_everywhere("the data", corpus.fingerprint)
    agree.same_everywhere("the content of addresses", copies.identities())
    return folder, Opened(made, corpus, data, of_answers, here.directory, here.checkpoints.check_claim, account)


def sample_prompt(run: Run, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of the prompt of the run's sample. Raises: ValueError if there are too many."""
    text = run.run.sample_prompt if run.run.sample_tokens else ""
    ids = [tokenizer.bos, *(map(int, tokenizer.encode([text])[0]) if text else ())]
    if run.run.sample_tokens and len(ids) >= run.data.seq_len:
        raise ValueError(f"run.sample_prompt has {len(ids)} tokens, but data.seq_len={run.data.seq_len} limits the "
                         "length of prompt and sample; shorten it")
    return ids


def batches_from(run: Run, corpus: sources.Corpus, start: resume.Start) -> Batches:
    """Return the run's batches from `start` on."""
    return resume.position(start, lambda position: opened.open_corpus(run.data, corpus, run.run.seed, position))


def _open_documents(run: Run, directory: Path, start: resume.Start) -> tuple[sources.Corpus, Batches]:
    """Open documents or pairs, and tokenize them if needed. Raises: ConfigError."""
    check_source(run)
    d = run.data
    with config.user_errors():
        described = sources.describe(d, vocab_size=run.model.vocab_size,
                                     folders=model_folder.companion_folders(run.run.dir, run.checkpoint.init_from))
        resume.check_tokenizer(run, start, described.tokenizer)     # checked before hours of tokenizing
        corpus = sources.corpus_of(described, described.open(directory / sources.CACHE, parts.Job(
            say.out, show=say.live if say.is_live() else None)))
        resume.check_data(run, start, corpus.fingerprint)
        for line in (preferences if d.source == "preferences" else packing).notes(d, corpus):
            say.out(line)
        return corpus, batches_from(run, corpus, start)


def _feed_of_taught(opened: Opened, start: resume.Start, state: State) -> BatchFeed:
    """Return the feed of documents with the predictions of the run's teacher."""
    made = opened.made
    with opened.account.count_as("restore"), watch.phase("loading the teacher", "restore"), \
            phases.phase("loading the teacher"):
        loaded = agree.everywhere(lambda: teacher.load(made, opened.corpus.tokenizer))
    return BatchFeed(made.run, made.program, cast(Batches, opened.data), start.step, loaded.teach)


def _feed_of_pairs(opened: Opened, start: resume.Start, state: State) -> BatchFeed:
    """Return the feed of pairs with the margins of the reference model: the weights that the run starts from."""
    assert isinstance(opened.data, Pairs)
    data, made, weights = opened.data, opened.made, None if start.saved else state.params
    with opened.account.count_as("data"), watch.phase("reference log-probabilities", watch.UNLIMITED), \
            phases.phase("computing the reference log-probabilities"):
        pairs = agree.everywhere(lambda: dpo_reference.with_references(
            made.run, made.program, data, opened.corpus, opened.directory, weights))
    return BatchFeed(made.run, made.program, cast(Batches, pairs), start.step)


def _answers() -> DataKind:
    """Return the kind of data of runs that sample answers. Only they import the room `rl`."""
    from meshtrain.rl import prepare

    def feed_of_answers(opened: Opened, start: resume.Start, state: State) -> Feed:
        data = cast("Prompts", opened.data)
        return agree.everywhere(lambda: prepare.feed_of(
            opened.made, start, state, data, opened.corpus.tokenizer, opened.ends, opened.directory,
            opened.check_claim))
    return DataKind(prepare.open_prompts, feed_of_answers, prepare.finish)


KINDS: Mapping[str, Callable[[], DataKind]] = {
    "documents": lambda: DataKind(_open_documents, lambda opened, start, state: BatchFeed(
        opened.made.run, opened.made.program, cast(Batches, opened.data), start.step)),
    "taught": lambda: DataKind(_open_documents, _feed_of_taught),
    "pairs": lambda: DataKind(_open_documents, _feed_of_pairs),
    "answers": _answers}
