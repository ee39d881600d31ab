"""python -m meshtrain.train [RUN.toml] [--section.key value …]: trains, and says what and where.

Exit codes: 0 done · 2 the user's mistake, one message · 75 stopped on request, state saved · 1 anything else.
"""
from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from meshtrain import assembly, config, devices
from meshtrain.cluster import agree, find, meet
from meshtrain.config import ConfigError, Run
from meshtrain.cost import flops, hardware, report
from meshtrain.data import packing, sources
from meshtrain.inference import sample
from meshtrain.run import loop, metrics, rundir
from meshtrain.run.checkpoint import CheckpointError, Checkpoints
from meshtrain.training.state import State

DONE, USER_ERROR, STOPPED, FAILED = 0, 2, 75, 1


def main(argv: Sequence[str]) -> int:
    try:
        run = config.load(argv)
        metrics.check_wandb(run)
        cluster = find.cluster(run.distributed, os.environ)
        # Which process this is belongs to no run.
        run = run.model_copy(update={"distributed": config.Distributed(timeout_s=run.distributed.timeout_s)})
        found, run = _devices(run, argv, cluster)
        if jax.process_index() > 0:
            sys.stdout = open(os.devnull, "w")      # process 0 speaks for all
        agree.same_everywhere("the run", config.dump(run))
        made = agree.everywhere(lambda: assembly.assemble(run, found))
        with rundir.claimed(run) as directory:
            corpus, batches = agree.everywhere(lambda: _open_data(run, directory))
            agree.same_everywhere("the data", corpus.fingerprint)
            return _train(run, made, corpus, batches, directory)
    except ConfigError as error:
        return _fail(USER_ERROR, f"error: {error}", error)
    except meet.PeerError as error:
        return _fail(FAILED, f"error: {error}", error)
    except loop.TooManySkippedSteps as error:   # of all processes: they read the same metrics
        if jax.process_index() == 0:
            print(f"stopped: {error}", file=sys.stderr)
        return FAILED
    except (CheckpointError, assembly.BrokenProgramError) as error:
        return _fail(FAILED, f"error: {error}", error)


def _fail(code: int, message: str, error: Exception) -> int:
    if not agree.told_by_first(error):
        print(message, file=sys.stderr)
    meet.leave(code, error)
    return code


def _devices(run: Run, argv: Sequence[str], cluster: find.Cluster | None) -> tuple[Sequence[jax.Device], Run]:
    """The devices to run on. Without a run file or a mesh, the quickstart moves from simulated devices to real GPUs."""
    chosen = any(not arg.startswith("-") for arg in argv[:1]) or any(arg.startswith("--mesh.") for arg in argv)
    if not chosen and devices.gpus_expected():
        run = run.model_copy(update={"mesh": run.mesh.model_copy(update={"simulated_devices": 0})})
        found = devices.start(run, cluster)
        run = devices.on_gpus(run, len(found))
        print(f"found {len(found)} × {found[0].device_kind}: training on {run.mesh.fsdp}, all on the axis fsdp")
        return found[:run.mesh.fsdp], run
    return devices.start(run, cluster), run


def _train(run: Run, made: assembly.Assembly, corpus: sources.Corpus, batches: packing.Data, directory: Path) -> int:
    with jax.set_mesh(made.mesh), Checkpoints(directory / "checkpoints", every=run.checkpoint.every,
                                              keep=run.checkpoint.keep) as checkpoints:
        latest = checkpoints.latest()
        if latest is not None:
            with config.user_errors():
                metadata = checkpoints.metadata(latest)
            rundir.check_same_run(run, metadata, corpus.fingerprint, latest)
            if latest >= run.training.steps:
                print(f"{directory} is finished: it has {latest} of training.steps={run.training.steps} steps; "
                      "raise training.steps to go on")
                return DONE
        started = time.perf_counter()
        print(report.before(made), flush=True)
        state = agree.everywhere(lambda: _start_state(run, made, checkpoints, latest))
        if batches.num_validation_batches:
            made = agree.everywhere(lambda: assembly.compile_evaluation(made))
        step = agree.everywhere(lambda: assembly.compile_step(made))
        print(report.compiled(step, made, time.perf_counter() - started), flush=True)
        if jax.process_index() == 0:
            rundir.write_settings(run, directory, made.layout.rules.text)
        with metrics.open_writers(run, directory, latest or 0) as writer, loop.StopRequest().listening() as stop:
            state, done, val_loss = loop.train(
                run, made.program, step, state, batches, checkpoints, writer,
                rundir.metadata(run, made.layout.rules.text, corpus.fingerprint), stop, *_flops(made))
        if done < run.training.steps:
            print(f"stopped after step {done}, saved in {directory}; the same command goes on from there")
            return STOPPED
        _tell_the_end(run, made, corpus.tokenizer, state, val_loss, directory)
    return DONE


def _flops(made: assembly.Assembly) -> tuple[float, float | None]:
    """Model FLOPs of a step, and the peak FLOP/s of all devices together (None where the table does not know it)."""
    run = made.run
    tokens = run.data.global_batch * run.data.seq_len
    gpu = hardware.from_device_kind(made.mesh.devices.flat[0].device_kind)
    peak = gpu and gpu.peak(run.model.compute_dtype)
    return (tokens * flops.model_flops_per_token(made.model.parameters(), run.model, run.data.seq_len),
            peak * made.mesh_spec.num_devices if peak else None)


def _open_data(run: Run, directory: Path) -> tuple[sources.Corpus, packing.Data]:
    """What the run reads, tokenized where it is not yet, and its batches."""
    d = run.data
    with config.user_errors():
        corpus = sources.open_corpus(d, vocab_size=run.model.vocab_size, cache_dir=directory / ".meshtrain")
        return corpus, packing.pack(
            corpus.sources, corpus.weights, bos=corpus.tokenizer.bos, seq_len=d.seq_len, global_batch=d.global_batch,
            seed=run.run.seed, validation_fraction=d.validation_fraction, document_mask=d.document_mask)


def _start_state(run: Run, made: assembly.Assembly, checkpoints: Checkpoints, latest: int | None) -> State:
    """Restored, begun from another run's weights, or fresh."""
    abstract = made.program.spec.with_shardings()
    if latest is not None:
        with config.user_errors():
            state, _ = checkpoints.restore(latest, abstract)
        print(f"going on after step {latest}")
        return state
    state = assembly.initialize(made)
    if run.checkpoint.init_from:
        source, step = rundir.source_weights(run)
        with config.user_errors("checkpoint.init_from: "):
            weights, _ = source.restore(step, {"params": abstract.params}, part=True)
        print(f"weights from step {step} of {run.checkpoint.init_from}")
        state = State(state.step, weights["params"], state.opt_state)
    return state


def _tell_the_end(run: Run, made: assembly.Assembly, tokenizer, state: State, val_loss: float | None, directory: Path) -> None:
    if val_loss is not None:
        print(f"validation loss {val_loss:.4f} nats per token ({val_loss / 0.6931471805599453:.3f} bits)")
    if run.run.sample_tokens and made.mesh_spec.sizes["stage"] > 1:
        print("no sample of text: it would gather all layers, and with mesh.stage > 1 they may not fit on one device")
    elif run.run.sample_tokens:
        generate = sample.build(made.model, made.program.execution, run.data.seq_len, tokenizer.bos, made.program.order)
        text = sample.text(generate, state.params, run.data.seq_len, run.run.sample_tokens, run.run.seed, tokenizer.decode)
        print(f"a sample:\n{text}\n")
    print(f"written: {directory}/ with config.toml, rules.toml, metrics.jsonl, checkpoints/ and tensorboard/")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
