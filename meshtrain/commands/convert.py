"""Reads and writes Hugging Face model folders: python -m meshtrain.convert HF_DIR, or RUN_DIR OUT.

HF_DIR alone: checks the folder and prints its [model] table. --checkpoint.init_from HF_DIR starts a run from it.
RUN_DIR OUT: writes the weights of a run's checkpoint as the folder OUT, which is complete or absent. LoRA adapters are
merged into the weights. HF_DIR OUT --merge ADAPTERS: writes the model with adapters in PEFT's format merged into its
weights. --average last:8 writes the mean of the weights of the last 8 checkpoints. Uses CPUs; a launcher can start
several processes. Exit codes: 0 · 1 any other failure · 2 a mistake in the settings · 75 stopped on request.
"""
from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from meshtrain import config, devices, files, names, trained
from meshtrain.checkpoint import adapters, averages, resume
from meshtrain.checkpoint.averages import CheckpointMean
from meshtrain.checkpoint.saved import Saved
from meshtrain.checkpoint.store import CheckpointError
from meshtrain.cluster import agree, find
from meshtrain.cluster.lost import PeerError
from meshtrain.config import ConfigError
from meshtrain.huggingface import folder
from meshtrain.huggingface.weights import ends, export, exports, new_folder, peft, pretrained
from meshtrain.model import transformer
from meshtrain.run import command, contents, say, trees
from meshtrain.storage import addresses, copies, model_folder
from meshtrain.units import plural

DTYPES = ("float32", "bfloat16", "float16")
MOST_CHECKPOINTS = 1000


def _last(text: str) -> int:
    """Return the number of checkpoints of --average. Raises: ValueError."""
    name, _, count = text.partition(":")
    if name != "last" or not count.isdecimal() or not 2 <= int(count[:20]) <= MOST_CHECKPOINTS:
        raise ValueError(f"is not last:N with N from 2 to {MOST_CHECKPOINTS}")
    return int(count)


def _shares(text: str) -> str | list[float]:
    """Return the value of --shares: a shape, or numbers above 0. Raises: ValueError."""
    if text in (names.LINEAR, names.SQRT):
        return text
    try:
        numbers = [config.number("a number", 0, positive=True)(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"is neither {names.LINEAR} nor {names.SQRT} nor a list of numbers above 0") from None
    return numbers


COMMAND = config.Command("meshtrain.convert", config.OF_TRAINED | {
    "dtype": config.Option(f"dtype of the weights: {', '.join(DTYPES)} (default: bfloat16; for adapters "
                           f"float32)", "D", "float32", config.one_of(*DTYPES)),
    "shard-gb": config.Option("maximum size of a file in GB", "G", "5",
                              config.number("a number of gigabytes", 1e-9, positive=True), 5),
    "average": config.Option("write the mean of the last N checkpoints, up to --step, computed in float32", "last:N",
                             "last:8", _last),
    "shares": config.Option("their shares in the mean: a number for each, oldest first, or the learning-rate decay "
                            "that the mean imitates, linear (equal shares) or 1-sqrt", "S", "1-sqrt",
                            _shares, names.LINEAR),
    "adapters": config.Option("write only the adapters of a run with LoRA, in PEFT's format"),
}, "HF_DIR | RUN_DIR OUT", (1, 2), keys=False)


@command.entry(COMMAND, __doc__, (CheckpointError, PeerError), agree.first_reports)
def main(asked: config.Arguments) -> None:
    _check(asked)
    if len(asked.names) == 1:
        copies.forget()
        with config.user_errors():
            directory = model_folder.local_path(asked.names[0], weights="copied", tell=say.err)
        say.out(_table(directory))
        return
    copies.forget()
    run_dir, out = asked.names[0], _out(asked.names[1])
    if asked["merge"]:
        say.out(_export_merged(run_dir, out, asked))
        return
    cluster = find.cluster(config.Distributed(), os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    all_devices = devices.start(config.Run(run=config.Identity(compilation_cache="")), cluster)
    if asked["average"]:
        average = averages.open_last(run_dir, asked["average"], asked["step"], asked["shares"])
        if jax.process_index() == 0:
            say.out(average.describe())
    else:
        average = averages.CheckpointMean((resume.source_of(run_dir, asked["step"], asked["weights"]),), (1.0,))
    said = (_export_adapters(all_devices, average, run_dir, out, asked["dtype"] or "float32") if asked["adapters"] else
            _export(all_devices, average, run_dir, out, asked["dtype"] or "bfloat16", int(asked["shard-gb"] * 1e9)))
    if jax.process_index() == 0:
        say.out(said)


def _check(asked: config.Arguments) -> None:
    """Raises: ConfigError if options contradict each other."""
    count, shares, merged = asked["average"], asked["shares"], asked["merge"]
    if merged and len(asked.names) == 1:
        raise ConfigError(f"--merge {merged} needs a folder to write to: python -m meshtrain.convert {asked.names[0]} "
                          f"OUT --merge {merged}")
    if merged and (asked["adapters"] or count):
        raise ConfigError(f"--merge adds adapters to the weights of one checkpoint or folder; leave "
                          f"{'--average' if count else '--adapters'} or --merge out")
    if "shares" in asked and not count:
        raise ConfigError("--shares needs --average; add e.g. --average last:N, or leave --shares out")
    if count and len(asked.names) == 1:
        raise ConfigError(f"--average last:{count} averages the checkpoints of a run; give RUN_DIR and OUT")
    if "weights" in asked and (count or len(asked.names) == 1):
        raise ConfigError(f"--weights {asked['weights']}: " + (
            "--average takes the last weights of each checkpoint; give --weights or --average" if count else
            "a model folder has one set of weights; leave it out"))
    if count and not isinstance(shares, str) and len(shares) != count:
        raise ConfigError(f"--shares has {len(shares)} numbers for the {count} checkpoints of --average last:{count}; "
                          f"give one for each, oldest first")


def _out(name: str) -> new_folder.Target:
    if not addresses.is_remote(name):
        return Path(name)
    with config.user_errors():
        address = addresses.parse(name)
    if address.scheme not in addresses.BUCKETS or not address.path:
        raise ConfigError(f"{addresses.hide_secrets(name)} cannot be written; give a directory, or a folder in a "
                          f"bucket, s3://BUCKET/… or gs://BUCKET/…")
    return address


def _table(directory: Path) -> str:
    """Return the [model] section of a model folder as text. Raises: ConfigError with every fault of the folder."""
    if not model_folder.is_at(directory) and os.path.isdir(directory / "checkpoints"):
        raise ConfigError(f"{directory} is a run directory; also give the model folder to write its weights to: "
                          f"python -m meshtrain.convert {directory} OUT")
    with config.user_errors():
        if not files.is_dir(directory):
            raise ConfigError(f"{directory} is not a directory; give a Hugging Face model folder, or a run directory "
                              f"and OUT")
        opened = folder.open_folder(directory)
        shape = config.Model(**opened.model)
        folder.match(opened, shape, pretrained.parameter_paths(transformer.build(shape)))
    for note in opened.notes:
        say.err(f"note: {note}")
    size = sum(entry.stop - entry.start for entry in opened.entries.values())
    return (f"# {opened.directory}: {opened.family.architecture}, {len(opened.entries)} tensors of "
            f"{size / 1e9:.2f} GB\n"
            f"{config.shape_table(shape)}")


def _export(all_devices: Sequence[jax.Device], average: CheckpointMean, run_dir: str, out: new_folder.Target,
            dtype: str, shard_bytes: int) -> str:
    """Write the weights as a model folder, with one parameter in memory at a time. Return the line to print."""
    saved = average.last
    with config.user_errors():
        shape = config.Model(**contents.open_section(saved.run, "model", run_dir))
    model = transformer.build(shape)
    mesh = Mesh(np.array(all_devices), ("all",), axis_types=(AxisType.Auto,))
    wanted = {info.name: jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=NamedSharding(
        mesh, _spread(info.shape, mesh.size))) for info in model.parameters()}
    with config.user_errors():
        leaf = average.leaf(wanted, merge=True, of_last=[
            info.name for info in model.parameters() if info.role == "balance"])
        size = export.write(out, model, leaf, dtype=dtype, shard_bytes=shard_bytes, data=saved.run["data"],
                            ends=_ends(saved, run_dir),
                            source=exports.find_companions(model_folder.local_path(run_dir)))
    return f"{out}: {_describe(average, 'weights')} of {run_dir}, {size / 1e9:.2f} GB in {dtype}"


def _describe(average: CheckpointMean, what: str) -> str:
    steps = ", ".join(str(saved.step) for saved in average.saved)
    kind = "mean " if len(average.saved) > 1 else "averaged " if average.last.averaged else ""
    return f"the {kind}{what} of {plural(len(average.saved), 'step')} {steps}"


def _export_adapters(all_devices: Sequence[jax.Device], average: CheckpointMean, run_dir: str, out: new_folder.Target,
                     dtype: str) -> str:
    """Write the adapters as a PEFT folder. Return the line to print."""
    saved, section = average.last, adapters.section(average.last)
    with config.user_errors():
        if not section:
            raise ConfigError(f"--adapters: {run_dir} has no adapters, because it trained without LoRA; leave the "
                              f"option out")
        shape = config.Model(**contents.open_section(saved.run, "model", run_dir))
        model = transformer.build(shape, config.Lora(**section))
    whole = NamedSharding(Mesh(np.array(all_devices), ("all",)), P())
    wanted = {info.name: jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=whole) for info in model.parameters()}
    with config.user_errors():
        size = peft.write(out, model, average.leaf(wanted, merge=False, of_last=()), dtype=dtype,
                          base=saved.run["checkpoint"]["init_from"], data=saved.run["data"],
                          source=exports.find_companions(model_folder.local_path(run_dir)), ends=_ends(saved, run_dir))
    if len(average.saved) > 1 and jax.process_index() == 0:
        say.err("note: A and B are averaged separately, and the product of their means is not the mean of their "
                "products; without --adapters, the adapters of each checkpoint are merged first and the mean is exact")
    return f"{out}: {_describe(average, 'adapters')} of {run_dir}, {size / 1e6:.2f} MB in {dtype}"


def _export_merged(directory: str, out: new_folder.Target, asked: config.Arguments) -> str:
    """Write a model with adapters merged into its weights, which are all in memory. Return the line to print."""
    words = ["--model.compute_dtype", asked["dtype"]] if asked["dtype"] else []
    source = trained.describe(directory, asked["step"], words, "convert", weights=asked["weights"],
                              merge=asked["merge"])
    run, model = source.run, source.place()
    dtype, data = run.model.compute_dtype, run.data.model_dump() | ({"seq_len": 0} if source.of_folder else {})
    with config.user_errors(), jax.set_mesh(model.mesh):
        size = export.write(out, model.model, trees.leaves_of(model.params).__getitem__, dtype=dtype, data=data,
                            shard_bytes=int(asked["shard-gb"] * 1e9), source=source.files, ends=source.ends)
    return f"{out}: the weights of {directory} with the adapters of {asked['merge']}, {size / 1e9:.2f} GB in {dtype}"


def _ends(saved: Saved, run_dir: str) -> ends.Ends:
    agreed = ends.agree_on(lambda: ends.of_saved(saved, exports.find_companions(model_folder.local_path(run_dir))))
    if agreed.note and jax.process_index() == 0:
        say.err(f"note: {agreed.note}")
    return agreed


def _spread(shape: tuple[int, ...], num_shards: int) -> P:
    """Return a spec that shards a parameter evenly along its last divisible dim; P() if no dim is divisible."""
    dims = [dim for dim in reversed(range(len(shape))) if shape[dim] % num_shards == 0]
    return P(*[None] * dims[0], "all") if dims else P()
