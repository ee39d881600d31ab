"""Trains a run from a start to its last step. After a loss spike it trains again from the checkpoint before it."""
from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable
from typing import NamedTuple

from meshtrain import assembly, starts, training_data
from meshtrain.assembly import Assembly
from meshtrain.checkpoint import resume
from meshtrain.checkpoint.places import Places, SaveInRunDir, SaveOnHosts
from meshtrain.cluster import agree, watch
from meshtrain.huggingface.weights import pretrained
from meshtrain.huggingface.weights.exports import Export, Exports
from meshtrain.journal import goodput, metrics
from meshtrain.journal.guards import TooManyRollbacks
from meshtrain.journal.history import Attempt
from meshtrain.journal.journal import Flops, Journal
from meshtrain.journal.progress import Progress
from meshtrain.journal.spikes import MAX_ROLLBACKS, LossSpike, Spikes
from meshtrain.run import bias_warmup, contents, hooks, loop, phases, rundir, say
from meshtrain.run.feeds import BatchFeed
from meshtrain.run.loop import Feed
from meshtrain.run.replicas import Replicas
from meshtrain.training.state import State
from meshtrain.training.step import Program
from meshtrain.training_data import Opened
from meshtrain.units import amount


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledRun:
    """step: the compiled training step. replicas: the check of replicas; None: there is none. compile_evaluation:
    returns the program with a compiled evaluation, called after the first step; None: `made` has it, or the feed does
    not evaluate."""
    made: Assembly
    step: Callable
    replicas: Replicas | None
    compile_evaluation: Callable[[], Program] | None


def warm_up_biases(compiled: CompiledRun, start: resume.Start, state: State, feed: Feed, account: goodput.Account
                   ) -> State:
    """Return the state of a new run with warmed-up biases if experts.bias_warmup asks for it; else the same state. A
    stop request meanwhile ends the process without saving."""
    made, passes = compiled.made, compiled.made.run.experts.bias_warmup
    if start.saved is not None or not passes:
        return state
    assert isinstance(feed, BatchFeed)
    with account.count_as("start"), watch.phase("evening out the experts", watch.UNLIMITED), \
            phases.phase("evening out the experts"):
        return agree.everywhere(lambda: bias_warmup.balance(
            feed, compiled.step, state, passes, lambda: assembly.initialize(made)))


class End(NamedTuple):
    """The end of training, at the last step or after a stop request. val_loss: the last validation loss; None: there
    was none."""
    step: int
    state: State
    val_loss: float | None


@dataclasses.dataclass(frozen=True, eq=False)
class Trainer:
    """Trains a run. named: see `starts.Beginning`. flops: FLOPs of a step. read_memory: returns the bytes in use on a
    device."""
    compiled: CompiledRun
    opened: Opened
    named: dict[str, str]
    places: Places
    exporting: Exports
    attempt: Attempt
    stop: loop.Stop
    flops: Flops
    read_memory: Callable[[], int]

    def train(self, start: resume.Start, state: State, feed: Feed) -> End:
        """Train from `start` to the last step, or until a stop request. All processes call it together.

        state, feed: the state and the feed at `start`. Raises: Halt, ReplicasDiffer, RolloutError.
        """
        spikes = Spikes(self.opened.made.run, start.value_of("spikes"))
        while True:
            try:
                return self._train(start, state, feed, spikes)
            except LossSpike as error:
                step, why = error.step, str(error)
            del state       # frees its memory for the restored state
            start, state, feed = self._rewind(start, feed, spikes, step, why)
            spikes = Spikes(self.opened.made.run, start.value_of("spikes"), start.rollbacks)

    def _train(self, start: resume.Start, state: State, feed: Feed, spikes: Spikes) -> End:
        """Train as `train`, to the first spike that has to be rolled back. Raises: LossSpike."""
        made, places, account = self.compiled.made, self.places, self.attempt.account
        run, directory = made.run, places.directory

        def metadata(step: int) -> dict:
            data = resume.data_metadata(self.opened.corpus, feed, step, self.opened.ends.as_saved())
            return {**rundir.metadata(run, made.layout.rules.text, data, self.named), "spikes": spikes.as_saved()}

        validation = feed.validation(made.program, self.stop)
        with (metrics.open_writers(run, directory, start.step, start.leaves_the_course,
                                   made.mesh.local_devices) as writers,
              Progress(run.training.steps, self.read_memory) as progress,
              hooks.Trace(run.metrics.profile_steps, directory / contents.TENSORBOARD, start.step) as trace,
              account.count_as(goodput.LOOP)):
            journal = Journal(run, writers, progress, self.flops, account, spikes, agree.exchange(socket.gethostname()))
            if start.rollbacks:
                journal.add({"rollbacks": start.rollbacks, "skipped_batches": start.skip_batches})
            if start.saved is None and self.opened.corpus.lines_left_out:
                journal.add({"lines_left_out": self.opened.corpus.lines_left_out})
            shared = SaveInRunDir(places.checkpoints, metadata)
            saving = (shared, SaveOnHosts(places.local, metadata, shared),
                      Export(self.exporting, self.opened.ends))
            checks = [hooks.CheckReplicas(self.compiled.replicas, run.training.check_replicas_every, saving)
                      ] if self.compiled.replicas else []
            prepare = hooks.Prepare(validation, self.compiled.compile_evaluation)
            state, done = loop.train(made.program.limit, self.compiled.step, state, feed, run.training.steps, journal,
                                     (prepare, validation, trace, *checks, *saving), self.stop)
        # A stop request during the step of a spike: only the local checkpoint has this state.
        if start.is_of(places.local) and done == start.step < run.training.steps:
            with watch.phase(f"checkpoint after step {done}", "save"):
                places.checkpoints.save(done, state, metadata(done))
        return End(done, state, validation.loss)

    def _rewind(self, start: resume.Start, feed: Feed, spikes: Spikes, spiked: int, why: str
                ) -> tuple[resume.Start, State, Feed]:
        """Return the start after the newest checkpoint before the spike, its state, and the feed without the batches
        between that checkpoint and the spike. Raises: TooManyRollbacks."""
        made, places = self.opened.made, self.places
        assert isinstance(feed, BatchFeed)
        if spikes.rollbacks >= MAX_ROLLBACKS:
            raise TooManyRollbacks(f'{why}, and the run has already rolled back {MAX_ROLLBACKS} times, the maximum; '
                                   f'lower optimizer.learning_rate={made.run.optimizer.learning_rate}, check the '
                                   'data, or start again with training.loss_spike="skip"')
        with self.attempt.account.count_as("restore"), watch.phase("going back before a spike", "restore"):
            new = resume.before_spike(made.run, start, spiked, places.checkpoints, places.local, made.state_shapes)
            left_out = amount(spiked - new.step, "batch")
            say.out(f"{why}: back to step {new.step}, without the {left_out} up to the spike "
                    f"(training.loss_spike=\"rollback\", {spikes.rollbacks + 1} of {MAX_ROLLBACKS})")
            new = dataclasses.replace(new, rollbacks=spikes.rollbacks + 1)
            self.attempt.go_back(new.step)
            state, batches = agree.everywhere(lambda: (
                starts.start_state(made, new, None if new.saved else pretrained.open_folder(made.run, made.model)),
                training_data.batches_from(made.run, self.opened.corpus, new)))
            self.exporting.set_aside_after(new.step)
            resume.begin(made.run, new, places.checkpoints, places.local, made.layout.rules.text)
        state = warm_up_biases(self.compiled, new, state, feed, self.attempt.account)
        return new, state, feed.restart(batches, new.step)
