"""Trains a model: python -m meshtrain.train [RUN.toml] [--section.key value …].

Exit codes: 0 done · 1 any other failure · 2 a mistake in the settings · 75 stopped on request, state saved.
"""
from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import math
import os
import shlex
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from meshtrain.run import phases, say, stops

BEGAN = time.perf_counter() if __name__ == "__main__" else None     # None if called within another process
# here, not in main: signals are handled while jax is imported, which takes seconds; silences messages of its C++
if __name__ == "__main__":
    say.begin()
    stops.listen()
    phases.begin("starting")
    with say.without_noise():
        importlib.import_module("jax")

import jax

from meshtrain import assembly, config, devices, elastic, files, hardware, shipped, starts, trained, training_data
from meshtrain.checkpoint import ends, exports, pretrained, resume
from meshtrain.checkpoint.checkpoint import Checkpoints
from meshtrain.checkpoint.local import LocalCheckpoints
from meshtrain.checkpoint.saved import BackgroundSaves, Saved
from meshtrain.cluster import agree, find, meet, watch
from meshtrain.cluster.lost import PeerError
from meshtrain.config import ConfigError, Run
from meshtrain.cost.formulas import flops
from meshtrain.data import sources
from meshtrain.data.documents import tokenizer as tokenizers
from meshtrain.files import FileSystemError
from meshtrain.inference.detokenizer import Words
from meshtrain.inference.generate import GenerationLimits
from meshtrain.inference.sampling import Picking
from meshtrain.inspection import measured, memory, report
from meshtrain.inspection.inspected import Inspected
from meshtrain.journal import goodput, history, metrics, rows, trackers
from meshtrain.journal.guards import Halt, TooManyRollbacks
from meshtrain.journal.journal import Flops, Journal
from meshtrain.journal.progress import Progress
from meshtrain.journal.spikes import MAX_ROLLBACKS, LossSpike, Spikes
from meshtrain.rl.rewards import workers
from meshtrain.rl.rollouts import RolloutError
from meshtrain.run import bias_warmup, bucket, contents, loop, rundir
from meshtrain.run.feeds import BatchFeed
from meshtrain.run.hooks import Trace
from meshtrain.run.loop import Feed
from meshtrain.run.replicas import Replicas, ReplicasDiffer
from meshtrain.run.stops import DONE, FAILED, STOPPED, USER_ERROR
from meshtrain.sharding import rules
from meshtrain.storage import addresses, copies, mirror
from meshtrain.training import objective
from meshtrain.training.state import State
from meshtrain.training_data import Opened
from meshtrain.units import counted, size

PEERS_STOP_S = 3.0      # a stop signal for a run reaches all its processes within this time


def main(argv: Sequence[str]) -> int:
    account, files.tell = goodput.Account(BEGAN), say.err
    try:
        try:
            run = config.load(argv)
        finally:
            phases.end()
        trackers.check(run)
        cluster = find.cluster(run.distributed, os.environ)
        # The index of this process is not a setting of the run.
        run = run.model_copy(update={"distributed": run.distributed.without_place()})
        index, count = (cluster.index, cluster.count) if cluster else (0, 1)
        say.format_lines(run.run.log_format, index, count)
        if index:
            sys.stdout = open(os.devnull, "w", encoding="utf-8")      # only process 0 prints
        limits = watch.PhaseLimits(run.training.step_timeout_s, run.distributed.timeout_s,
                                   *[run.training.phase_timeout_s] * 3)
        with watch.on(limits, index, count, say.err) as watchdog:
            with phases.phase(f"meeting {count} processes" if count > 1 else "starting the devices"):
                found, run = _devices(run, argv, cluster)
            run, fewer = elastic.fitted(run, len(found))
            return _run(run, found, fewer, account, watchdog)
    except ConfigError as error:
        return _fail(USER_ERROR, f"error: {error}", error)
    except Halt as error:
        if jax.process_index() == 0:
            say.err(f"stopped: {error}")
        return FAILED
    except (PeerError, FileSystemError, assembly.BrokenProgramError, ReplicasDiffer, RolloutError) as error:
        return _fail(FAILED, f"error: {error}", error)
    except Exception as error:
        if files.is_moment(error):      # a failure of the file system outside the places that handle it
            where = traceback.extract_tb(error.__traceback__)[-1]
            return _fail(FAILED,
                         f"error: {files.said(error)}, in {where.name} of {where.filename}; check the file system "
                         "(free space, mounts, server) and start again", error)
        if agree.told_by_first(error):      # process 0 prints the traceback
            return _fail(FAILED, "", error)
        _wait_for_stop(error)
        raise
    finally:
        say.format_lines("plain")


def _run(run: Run, found: Sequence[jax.Device], fewer: str, account: goodput.Account, watchdog: watch.Watchdog) -> int:
    stops.end_together(agree.part)
    if fewer:
        say.out(fewer)
    agree.same_everywhere("the run", config.dump(run))
    made = agree.everywhere(lambda: assembly.assemble(run, found))
    agree.everywhere(lambda: check_memory(made))
    directory = mirror.directory(run.run.dir)
    remote = addresses.is_remote(run.run.dir)
    claimed = bucket.claim if remote else rundir.claim
    with claimed(run) as claim, watchdog.kept_in(directory / contents.STACKS, apart=remote), \
            jax.set_mesh(made.mesh), resume.checkpoints_of(run.run.dir, claim, every=run.checkpoint.every,
                                  keep=run.checkpoint.keep, keep_every=run.checkpoint.keep_every) as checkpoints:
        fallback = copies.named_home("states", addresses.parse(run.run.dir)) if remote else None
        local = LocalCheckpoints(run.checkpoint.local_dir, run.checkpoint.local_every, directory, fallback=fallback)
        checkpoints.fallback = local if remote else None
        with watch.phase("looking for a checkpoint", "restore"):
            start = resume.find(run, checkpoints, local, made.state_shapes, named := _named_files(made))
        run, origin = _with_documents_end(run, start)
        made = dataclasses.replace(made, run=run)
        exporting = exports.Exports(run, made.model, checkpoints, made.state_shapes.params)
        if start.step >= run.training.steps:
            if start.is_of(local):      # run.dir has no checkpoint of the last step
                with watch.phase("last checkpoint", "save"):
                    checkpoints.save(start.step, starts.start_state(made, start, None), start.saved.metadata)
                    checkpoints.wait()
            say.out(f"{run.run.dir} is finished: it has {start.step} of training.steps={run.training.steps} steps; "
                    "increase training.steps to continue")
            local.forget()      # remove local checkpoints that a crash or a failing file system left
            with watch.phase("export", "save"):
                return _ended(exporting.finish())
        begun = {"on": f"{made.mesh_spec}: {made.mesh_spec.num_devices} × {made.mesh.devices.flat[0].device_kind}",
                 "processes": jax.process_count(), "cause": start.cause}
        with history.record_attempt(directory, start.step, account, begun) as attempt:
            return _train(_Session(made, claim, checkpoints, local, exporting, attempt, origin, named), start)


def _with_documents_end(run: Run, start: resume.Start) -> tuple[Run, Saved | None]:
    """Resolve data.eos. Return (the run with it, the checkpoint that it comes from, if any). That is the checkpoint
    that the run resumes from, or the one whose weights it loads."""
    if start.saved:
        return resume.in_force(run, start), start.saved
    with watch.phase("opening the data", watch.UNLIMITED), config.user_errors():      # may copy remote files
        origin = resume.origin(run)
        eos, line = agree.on_first(lambda: ends.default(run, origin))
    if line:
        say.out(line)
    return run.replaced(data={"eos": eos}), origin


def _named_files(made: assembly.Assembly) -> dict[str, str]:
    """Return key that names a file -> content of the file, because a file may change under the same name."""
    rl, found = made.run.rl, {"sharding.rules": made.layout.rules.text}
    if rl.rules:
        with config.user_errors():
            found["rl.rules"] = rules.load(shipped.rule_file(rl.rules), "rl.rules").text
    if digest := workers.digest(rl.reward):
        found["rl.reward"] = f"{digest} {rl.reward.rpartition(':')[2]}"
    return agree.on_first(lambda: found)


def check_memory(made: assembly.Assembly) -> None:
    """Check that the state fits into this machine's memory, which simulated devices share. Raises: ConfigError."""
    local = jax.local_devices()
    if local[0].platform != "cpu":
        return
    held = memory.formula(made)
    state_bytes = len(local) * (held["params"] + held["optimizer"])
    if state_bytes > (has := devices.memory_bytes(local)):
        raise ConfigError(f"the weights and the optimizer's state take {size(state_bytes)} on {len(local)} simulated "
                          f"devices of this machine, which has {size(has)}; use a smaller model, or train it on GPUs "
                          f"(inspect and plan work without GPUs)")


def _fail(code: int, message: str, error: Exception) -> int:
    if code == FAILED:
        _wait_for_stop(error)
    if not agree.told_by_first(error):
        say.err(message)
    meet.leave(code, error)
    return code


def _wait_for_stop(error: Exception) -> None:
    """After a peer is lost, wait for a stop signal: the signal that ended the peer may also reach this process."""
    if jax.distributed.is_initialized() and not getattr(error, "agreed", False):
        time.sleep(PEERS_STOP_S)


def _devices(run: Run, argv: Sequence[str], cluster: find.Cluster | None) -> tuple[Sequence[jax.Device], Run]:
    """Start the devices. Return (devices to use, run). Without a run file or a mesh, the quickstart uses GPUs if there
    are any."""
    if not config.names_mesh(argv) and devices.gpus_expected():
        run = run.replaced(mesh={"simulated_devices": 0})
        found = devices.start(run, cluster)
        run = devices.on_gpus(run, len(found))
        say.out(f"found {len(found)} × {found[0].device_kind}: training on {run.mesh.fsdp}, all on the axis fsdp")
        return found[:run.mesh.fsdp], run
    if run.mesh.simulated_devices:      # checked before devices start, each of which takes threads and memory
        elastic.check(run, run.mesh.simulated_devices)
    return devices.start(run, cluster), run


@dataclasses.dataclass(eq=False)
class _Session:
    """Everything that one start of the command opens and compiles in its claimed run.dir before training begins.

    made: with a compiled evaluation, if there are held-out documents. origin: the checkpoint that the run resumes from,
    or the one of another run whose weights it loads. named: see `_named_files`. ends: the ends of answers. step: the
    compiled training step.
    """
    made: assembly.Assembly
    claim: rundir.Claim
    checkpoints: Checkpoints
    local: LocalCheckpoints
    exporting: exports.Exports
    attempt: history.Attempt
    origin: Saved | None
    named: dict[str, str]
    corpus: sources.Corpus | None = None
    ends: ends.Ends | None = None
    step: Callable | None = None
    replicas: Replicas | None = None

    @property
    def run(self) -> Run:
        return self.made.run

    @property
    def directory(self) -> Path:
        return self.claim.directory

    def begin(self, start: resume.Start) -> None:
        resume.begin(self.run, start, self.checkpoints, self.local, self.made.layout.rules.text)


def _train(session: _Session, start: resume.Start) -> int:
    """Train from `start` to the end, with rollbacks of loss spikes if configured. Return the exit code."""
    run, account = session.run, session.attempt.account
    given, data = _open(session, start)
    say.out(report.before(session.made))
    state = _begun(session, start, given)
    feed = training_data.of_run(run).feed(
        Opened(session.made, session.corpus, data, session.ends, session.directory, session.checkpoints.check_claim,
               account), start, state)
    _compile(session, feed)
    session.begin(start)
    if start.saved is None:
        pretrained.keep_companions(run, session.directory)
    _price(session.made, session.step, session.directory)
    if start.saved is None and run.experts.bias_warmup:     # a stop request here ends the process without saving
        assert isinstance(feed, BatchFeed)
        with account.count_as("start"), watch.phase("evening out the experts", watch.UNLIMITED), \
                phases.phase("evening out the experts"):
            state = agree.everywhere(lambda: bias_warmup.balanced(
                session.made.program, session.step, state, feed.data, run.experts.bias_warmup,
                lambda: assembly.initialize(session.made)))
    with account.count_as("rest"), stops.defer() as listener:
        spikes, stop = Spikes(run, start.kept("spikes")), loop.Stop(listener, session.claim)
        while True:
            try:
                state, done, val_loss = _steps(session, state, feed, start, spikes, stop)
                break
            except LossSpike as found:
                spike = (found.step, str(found))
            state = None    # free the memory for the restored state
            start, state, feed = _back_before(session, start, spikes, *spike)
            spikes = Spikes(run, start.kept("spikes"), start.rollbacks)
        missing = _saved(session, done)
        if done == run.training.steps:
            feed.finish()
        code = STOPPED if done < run.training.steps else FAILED if missing else DONE
        session.attempt.end(listener.ending(done == run.training.steps), code=code)
    if done < run.training.steps:
        say.out(session.attempt.describe())
        say.out(f"stopped after step {done}, saved in {run.run.dir}; run the same command again to resume")
        return STOPPED
    if run.run.sample_tokens and not stop.agreed:
        with watch.phase("sample of text", "compile"):
            _tell_sample(session, state)
    if jax.process_index() == 0:
        say.out(_summary(session, val_loss))
    return _ended(missing)


def _open(session: _Session, start: resume.Start):
    """Open the corpus, and tokenize it if needed. Return (the model folder that a new run starts from, or None; the
    batches from `start` on, or prompts)."""
    run, made = session.run, session.made
    # tokenizing may take hours
    with session.attempt.account.count_as("data"), watch.phase("opening the data", watch.UNLIMITED), \
            phases.phase("opening the data"):
        given = None if start.saved else agree.everywhere(lambda: pretrained.open_folder(run, made.model))
        session.corpus, data = agree.everywhere(
            lambda: training_data.of_run(run).open(run, session.directory, start))
        with config.user_errors():
            session.ends = ends.agree_on(lambda: ends.of_run(run, session.origin))
            sample_prompt(run, session.corpus.tokenizer)        # reports a mistake before the first step
    say.out(f"answers end with {session.ends.shown(session.corpus.tokenizer)}")
    if session.ends.note:
        say.out(f"note: {session.ends.note}")
    agree.same_everywhere("the data", session.corpus.fingerprint)
    agree.same_everywhere("the content of addresses", copies.identities())
    return given, data


def _begun(session: _Session, start: resume.Start, given) -> State:
    fresh = start.saved is None and not given and not session.run.checkpoint.init_from
    with session.attempt.account.count_as("start" if fresh else "restore"), \
            watch.phase("restore" if start.saved else "initialization", "restore"), \
            phases.phase(f"restoring step {start.step}" if start.saved else "initializing the weights" if fresh else
                         "loading the weights"):
        return agree.everywhere(lambda: starts.start_state(session.made, start, given))


def _compile(session: _Session, feed: Feed) -> None:
    """Compile the step, the evaluation if there are held-out documents, and the check of replicas."""
    with session.attempt.account.count_as("compile"), watch.phase("compile", "compile"), \
            phases.phase("compiling", "compiled in"):
        if feed.evaluates:
            session.made = agree.everywhere(lambda: assembly.compile_evaluation(session.made))
        session.step = agree.everywhere(lambda: assembly.compile_step(session.made))
        session.replicas = _replicas(session.made)


def _saved(session: _Session, done: int) -> str:
    """Wait for the last checkpoint and write missing exports. Return a text about failed exports, or ""."""
    with session.attempt.account.count_as("checkpoint"), watch.phase("last checkpoint", "save"), \
            phases.phase("saving the last checkpoint"):
        session.checkpoints.wait()
        session.local.forget()
    with watch.phase("export", "save"):
        return session.exporting.finish() if done == session.run.training.steps else ""


def _ended(missing: str) -> int:
    """Return the exit code of a run that has all its steps. missing: a text about failed exports, which is printed."""
    if missing and jax.process_index() == 0:
        say.err(f"error: the run is finished, but {missing}; check the directory and start the run again, which writes "
                f"the missing files")
    return FAILED if missing else DONE


def _replicas(made: assembly.Assembly) -> Replicas | None:
    """Return the compiled check of replicas; None if it is not configured, or the state has no replicas."""
    every = made.run.training.check_replicas_every
    found = Replicas(made.state_shapes, made.mesh) if every else None
    if found and not found.any:
        say.out(f"training.check_replicas_every={every}: only scalars are replicated on this mesh, so the check "
                f"is off")
        return None
    return found and found.compile()


def _steps(session: _Session, state: State, feed: Feed, start: resume.Start, spikes: Spikes,
           stop: loop.Stop) -> tuple[State, int, float | None]:
    """Run the loop from `start` on, with its hooks and writers. Return (state, number of steps, last validation loss).
    Raises: LossSpike if the run has to roll back."""
    run, made, directory, account = session.run, session.made, session.directory, session.attempt.account
    checkpoints, local = session.checkpoints, session.local

    def metadata(number: int) -> dict:
        data = resume.data_metadata(session.corpus, feed, number, session.ends)
        return {**rundir.metadata(run, made.layout.rules.text, data, session.named), "spikes": spikes.as_saved()}

    def saving(saves: BackgroundSaves, due: Callable[[int, bool], bool]) -> loop.Hook:
        return loop.Hook(due, lambda number, state: {"checkpoint_wait_s": saves.save(number, state, metadata(number))},
                         part="checkpoint")

    validation = feed.validation(made.program, stop)
    with (metrics.open_writers(run, directory, start.step, start.leaves_the_course,
                               made.mesh.local_devices) as writer,
          Progress(run.training.steps, _memory(made, session.step)) as progress,
          Trace(run.metrics.profile_steps, directory / contents.TENSORBOARD, start.step) as trace,
          account.count_as(goodput.LOOP)):
        log = Journal(run, writer, progress, _flops(made), account, spikes, agree.exchange(socket.gethostname()))
        feed.begin(log, stop.reached)
        if start.rollbacks:
            log.add({"rollbacks": start.rollbacks, "skipped_batches": start.skip_batches})
        shared = lambda number, ending: ending or checkpoints.due(number)
        hooks = (saving(checkpoints, shared),
                 saving(local, lambda number, ending: local.due(number) and not shared(number, ending)),
                 loop.Hook(session.exporting.due,
                           lambda number, state: session.exporting.make(
                               number, state.params, session.ends)))
        if session.replicas:
            hooks = (session.replicas.hook(run.training.check_replicas_every, hooks), *hooks)
        hooks = (validation.hook(), trace.hook(), *hooks)
        state, done = loop.train(made.program, session.step, state, feed, run.training.steps, log, hooks, stop)
    # A stop request during the step of a spike: only the local checkpoint has this state.
    if start.is_of(local) and done == start.step < run.training.steps:
        with watch.phase(f"checkpoint after step {done}", "save"):
            checkpoints.save(done, state, metadata(done))
    return state, done, validation.loss


def _back_before(session: _Session, start: resume.Start, spikes: Spikes, spiked: int,
                 why: str) -> tuple[resume.Start, State, Feed]:
    """Roll back to the newest checkpoint before the spike. Return (the new start, its state, the feed without the
    batches between that checkpoint and the spike). Raises: TooManyRollbacks."""
    run = session.run
    if spikes.rollbacks >= MAX_ROLLBACKS:
        raise TooManyRollbacks(f'{why}, and the run has already rolled back {MAX_ROLLBACKS} times, the maximum; lower '
                               f'optimizer.learning_rate={run.optimizer.learning_rate}, check the '
                               'data, or start again with training.loss_spike="skip"')
    with session.attempt.account.count_as("restore"), watch.phase("going back before a spike", "restore"):
        new = resume.before_spike(run, start, spiked, session.checkpoints, session.local, session.made.state_shapes)
        say.out(f"{why}: back to step {new.step}, without the {counted(spiked - new.step, 'batch')} up to the spike "
                f"(training.loss_spike=\"rollback\", {spikes.rollbacks + 1} of {MAX_ROLLBACKS})")
        new = dataclasses.replace(new, rollbacks=spikes.rollbacks + 1)
        session.attempt.go_back(new.step)
        state, batches = agree.everywhere(lambda: (starts.start_state(session.made, new, None),
                                                   training_data.batches_from(run, session.corpus, new)))
        session.begin(new)
    return new, state, BatchFeed(run, session.made.program, batches, new.step)


def _price(made: assembly.Assembly, step, directory: Path) -> None:
    """Print the memory of a device, and write cost.json, the output of `inspect --json`, which `meshtrain.report`
    compares with measurements."""
    if jax.process_index():
        return
    try:
        with phases.moving("pricing the step"):
            priced = Inspected(made, step)        # without XLA's log, which only `inspect` reads
            local = made.mesh.local_devices
            shared = f"\n{len(local)} devices: {size(len(local) * (priced.held['total'] or 0))} of this machine's " \
                     f"{size(devices.memory_bytes(local))}" if local[0].platform == "cpu" else ""
            say.out(report.memory_table(priced) + shared)
            costs = report.as_json(priced)
        files.replace(directory / measured.COST, json.dumps(costs))
    except Exception as error:      # a run must not fail because its costs are unknown
        say.err(f"{directory / measured.COST} is not written ({files.said(error)}); training continues, and the report "
                f"will have no predictions")


def _memory(made: assembly.Assembly, step) -> Callable[[], int]:
    """Return a function that returns the bytes in use on a device, or those of the compiled step if the backend does
    not report them."""
    device = made.mesh.local_devices[0]
    compiled = memory.held_by_program(made, step)["total"]
    return lambda: (device.memory_stats() or {}).get("bytes_in_use", compiled)


def _flops(made: assembly.Assembly) -> Flops:
    """Return the FLOPs of a step. Without a peak if the hardware table lacks the device."""
    run = made.run
    tokens = run.data.global_batch * run.data.seq_len
    gpu = hardware.from_device_kind(made.mesh.devices.flat[0].device_kind)
    peak = gpu and gpu.peak(run.model.compute_dtype)
    return Flops(tokens * flops.model_flops_per_token(made.model.parameters(), run.model, run.data.seq_len),
                 peak * made.mesh_spec.num_devices if peak else None)


def sample_prompt(run: Run, tokenizer: tokenizers.Tokenizer) -> list[int]:
    """Return the token ids of the prompt of the run's sample. Raises: ValueError if there are too many."""
    text = run.run.sample_prompt if run.run.sample_tokens else ""
    found = [tokenizer.bos, *(map(int, tokenizer.encode([text])[0]) if text else ())]
    if len(found) >= run.data.seq_len:
        raise ValueError(f"run.sample_prompt has {len(found)} tokens, but data.seq_len={run.data.seq_len} limits the "
                         "length of prompt and sample; shorten it")
    return found


def _tell_sample(session: _Session, state: State) -> None:
    run, tokenizer = session.run, session.corpus.tokenizer
    words = Words(tokenizer.decode, session.ends.stops, session.ends.ids)
    limits = GenerationLimits(run.run.sample_tokens, words.stop_ids, run.data.seq_len, words.at_string)
    try:
        with phases.phase("drawing a sample"):
            generator = trained.wrap(session.made, state.params).generator()
            prompt = sample_prompt(run, tokenizer)
            (answer,) = generator.complete([prompt], limits, Picking(temperature=0.8), run.run.seed)
    except Exception as error:
        if jax.process_count() > 1:     # the other processes would wait for this one
            raise
        say.err(f"no sample of text: {type(error).__name__}: {error}")
        return
    begins = f"after {run.run.sample_prompt!r}" if run.run.sample_prompt else "no prompt"
    say.out(f"a sample ({len(answer.tokens)} tokens, {begins}):\n{run.run.sample_prompt}{words.text(answer.tokens)}\n")


def _summary(session: _Session, val_loss: float | None) -> str:
    """Return the summary of a finished run: losses, goodput, its files, and further commands."""
    run, first, last = session.run, None, None
    assert session.corpus is not None
    goal, place = objective.of_run(run), shlex.quote(run.run.dir)
    column, unit = goal.column, f" {goal.unit}".rstrip()
    with contextlib.suppress(OSError):
        written = rows.MetricRows(session.directory / contents.METRICS)
        first, last = (next(ordered, {}).get(column) for ordered in (iter(written), reversed(written)))
    lines = [] if first is None or last is None else [
        f"{column} {first:.4f} → {last:.4f}{unit} in {counted(run.training.steps, 'step')}"]
    if val_loss is not None:
        bits = f" ({val_loss / math.log(2):.3f} bits)" if goal.unit == objective.NATS else ""
        lines += [f"validation {column} {val_loss:.4f}{unit}{bits}"]
    kept = [contents.CONFIG, contents.RULES, contents.METRICS, contents.HISTORY, measured.COST,
            f"{contents.CHECKPOINTS}/", *[f"{contents.TENSORBOARD}/"] * run.metrics.tensorboard]
    prompt = ("--prompt-ids '[[0]]'" if isinstance(session.corpus.tokenizer, tokenizers.Ids) else
              f"--prompt {shlex.quote(run.run.sample_prompt or 'The ')}")
    then = [f"python -m meshtrain.report {place}", f"python -m meshtrain.generate {place} {prompt}"]
    if run.metrics.tensorboard and not addresses.is_remote(run.run.dir):
        then += [f"tensorboard --logdir {place}"]
    return "\n".join([*lines, *filter(None, [session.attempt.describe()]),
                      f"written: {run.run.dir}/ with {', '.join(kept[:-1])} and {kept[-1]}",
                      "next:", *(f"  {words}" for words in then)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
