"""Checks across the keys of a run file, run before anything is started."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from meshtrain import custom, pattern
from meshtrain.config import conflicts, data_checks, layer_checks, layouts, named, path_checks, unused
from meshtrain.config.conflicts import Check, Conflict
from meshtrain.config.messages import ConfigError, join, next_multiple, toml, unknown_name
from meshtrain.config.sections import Mesh, Run
from meshtrain.names import AXES, LORA_ALSO, LORA_EXPERTS, LORA_TARGETS
from meshtrain.shipped import names, rule_file
from meshtrain.storage import addresses

# The run file's key that sets the size of each logical axis, for messages.
SIZE_KEYS = {"batch": "data.global_batch / training.microbatches", "seq": "data.seq_len",
             "residual_seq": "data.seq_len",
             "embed": "model.embed_dim", "heads": "model.num_heads", "kv_heads": "model.num_kv_heads",
             "head_dim": "model.head_dim", "mlp": "model.mlp_dim", "vocab": "model.vocab_size (padded to 256)",
             "layers": "model.num_layers", "expert": "model.num_experts", "expert_embed": "model.embed_dim",
             "expert_mlp": "model.expert_mlp_dim"}
BYTE_VOCAB = 257  # 256 bytes and the separator between documents


def problems(run: Run, checks: Sequence[Check] = ()) -> list[str]:
    """Return messages about keys that contradict each other or the files that they name; empty if the run is valid.
    checks: a part of CHECKS (OF_LAYOUT or APART_FROM_LAYOUT); (): all of CHECKS."""
    return [message for check in checks or CHECKS for message in check(run)]


def _check_keep_every(run: Run) -> Iterator[str]:
    keep_every, every = run.checkpoint.keep_every, run.checkpoint.every
    if keep_every and (not every or keep_every % every):
        remedy = f"; use a multiple of {every}, e.g. {-(-keep_every // every) * every}" if every else (
            f" (0: only the last); give both, e.g. both {keep_every}")
        yield (f"checkpoint.keep_every={keep_every} needs a checkpoint every {keep_every} steps, but they are saved "
               f"every checkpoint.every={every} steps{remedy}")


def _check_mesh(run: Run) -> Iterator[str]:
    mesh = run.mesh
    rest = [f"mesh.{axis}=-1" for axis in AXES if getattr(mesh, axis) == -1]
    if len(rest) > 1:
        yield f"{join(rest, 'and')}: only one axis can take the devices that are left; give the others a size"
    for axis in AXES:
        size = getattr(mesh, axis)
        if size == 0:
            yield f"mesh.{axis}=0 leaves no device; use 1, or -1 for the devices that are left"
    if mesh.full_devices and not rest:
        yield (f"mesh.full_devices={mesh.full_devices} needs an axis that can shrink (-1), but "
               f"there is none; use mesh.data=-1 or mesh.fsdp=-1, or leave full_devices out")
    if sorted(mesh.placement) != sorted(AXES):
        yield f"mesh.placement={toml(mesh.placement)} must name each axis once; use e.g. {toml(Mesh().placement)}"


def _check_rules(run: Run) -> Iterator[str]:
    for key, given in (("sharding.rules", run.sharding.rules), ("distill.rules", run.distill.rules),
                       ("rl.rules", run.rl.rules)):
        if given and not os.path.isfile(rule_file(given)):      # False also for a name that no file system allows
            known = names("sharding_rules")
            near = difflib.get_close_matches(Path(given).stem, known, n=1)
            remedy = f"did you mean {toml(near[0])}?" if near else f"shipped are {join(known, 'and')}"
            yield f"{key}={toml(given)} is not a file; {remedy}"


def _reads_bytes(run: Run) -> bool:
    sources = {data.source for data in run.data.mixture or [run.data]}       # "": unknown, which another check reports
    of_ids = {source for source in sources if run.data.bos_token and custom.is_path(source)}
    return run.data.tokenizer == "bytes" and not sources - of_ids <= {"tokens", ""}


def _check_clip(run: Run) -> Iterator[str]:
    if not run.optimizer.qk_clip:
        return
    key, model = f"optimizer.qk_clip={run.optimizer.qk_clip:g}", run.model
    present = {kind.mixer for kind in pattern.kinds(model) if pattern.mixer(kind.mixer).attends}
    normed = sorted(mixer for mixer in present if model.of(mixer).qk_norm != "off")
    if not present:
        yield f"{key} clips attention scores, but model.mixers={toml(model.mixers)} has no attention; leave it out"
    elif normed:
        yield (f"{key} scales the weights of queries and keys, but model.qk_norm={toml(model.of(normed[0]).qk_norm)} "
               f"divides by their length, so it has no effect; leave one of them out")
    yield from problems(run, conflicts.QK_CLIP)


def _check_depths(run: Run) -> Iterator[str]:
    if run.model.mtp_layers and not any(layer_checks.check_layers(run)):
        yield from problems(run, conflicts.MTP)


def _check_custom(run: Run) -> Iterator[str]:
    for key, value, _ in named.values(run):
        yield from custom.find_faults(key, value)


def _check_lora_targets(run: Run) -> Iterator[str]:
    for key, known in (("targets", (*LORA_TARGETS, *LORA_EXPERTS)), ("also", LORA_ALSO)):
        given = getattr(run.lora, key)
        for name in dict.fromkeys(given):
            if name not in known:
                yield unknown_name(f"lora.{key}", name, known)
            if given.count(name) > 1:
                yield f"lora.{key}={toml(given)} names {toml(name)} twice; name it once"


def _check_preferences(run: Run) -> Iterator[str]:
    if run.data.source == "preferences":
        yield from problems(run, conflicts.PREFERENCES)


def _check_objectives(run: Run) -> Iterator[str]:
    """Check the sections that a single objective reads."""
    objective = run.training.objective
    for name, rows in (("distill", conflicts.DISTILL), ("rl", conflicts.RL)):
        section = getattr(run, name)
        if objective == name:
            yield from problems(run, rows)
        elif given := [f"{name}.{key}={toml(value)}" for key, value in section
                       if value != type(section).model_fields[key].default]:
            yield (f'{join(given, "and")}: only training.objective="{name}" reads section [{name}], not '
                   f'{toml(objective)}; use "{name}", or leave the section out')


def is_address(text: str) -> bool:
    """Return whether text is HOST:PORT. An IPv6 address must be in brackets."""
    port = re.fullmatch(r"(?:[^\s:\[\]]+|\[[0-9a-fA-F:]+\]):(\d{1,5})", text)
    return bool(port) and 0 < int(port[1]) < 65536


def _check_distributed(run: Run) -> Iterator[str]:
    address, count, index = (run.distributed.coordinator_address, run.distributed.num_processes,
                             run.distributed.process_id)
    if address and not is_address(address):
        yield (f"distributed.coordinator_address={toml(address)} is not HOST:PORT; "
               "use e.g. node1:12345, with a port that is free on that host")
    if bool(count) != (index >= 0) or count and not address:
        yield (f"distributed.num_processes={count}, distributed.process_id={index} and distributed.coordinator_address="
               f"{toml(address)} belong together; give all three, or none if a launcher sets them")
    elif index >= count > 0:
        yield (f"distributed.process_id={index} is not one of distributed.num_processes={count} processes; "
               f"they are counted from 0 to {count - 1}")


def _check_profile(run: Run) -> Iterator[str]:
    steps, name = run.metrics.profile_steps, f"metrics.profile_steps={toml(run.metrics.profile_steps)}"
    if len(steps) not in (0, 2):
        yield f"{name} is not a first and a last step; use e.g. {toml(steps[:1] * 2 or (1, 1))}, or [] for no profile"
    elif steps and not 1 <= steps[0] <= steps[1] <= run.training.steps:
        yield (f"{name} must be steps from 1 to training.steps={run.training.steps}, the first not after the last; "
               f"use e.g. {toml((min(2, run.training.steps),) * 2)}, or [] for no profile")


# All checks, in the order of their messages.
CHECKS: tuple[Check, ...] = (
    path_checks.check_texts, path_checks.check_addresses, _check_custom,
    *conflicts.RUN, _check_keep_every, *conflicts.CHECKPOINT, path_checks.check_init_from,
    _check_mesh, _check_rules,
    Conflict(lambda run: run.model.position == "learned" and run.data.seq_len > run.model.max_seq_len,
             "{data.seq_len} is longer than the {model.max_seq_len} learned positions",
             "shorten the sequences or lengthen the table"),
    layer_checks.check_layers,
    Conflict(lambda run: run.model.matmul_dtype == "bfloat16" != run.model.compute_dtype,
             "{model.matmul_dtype} differs from {model.compute_dtype}, but only float8 may differ from it",
             'use model.compute_dtype="bfloat16", or "auto"'),
    Conflict(lambda run: run.model.vocab_size < BYTE_VOCAB and _reads_bytes(run),
             "{model.vocab_size} is too small for {data.source}, which has 256 bytes and a separator",
             f"use at least {BYTE_VOCAB}"),
    layer_checks.check_experts, data_checks.check_data,
    conflicts.MICROBATCHES, *conflicts.TRAINING, *conflicts.GROUPS, _check_clip, _check_depths, _check_lora_targets,
    *conflicts.LORA,
    *conflicts.DPO, _check_preferences,
    Conflict(lambda run: run.data.source and (run.training.objective == "rl") != (run.data.source == "prompts"),
             '{training.objective} and {data.source}: training.objective="rl" and data.source="prompts" need each '
             "other", "set both, or neither"),
    _check_objectives, _check_distributed,
    Conflict(lambda run: run.metrics.wandb in ("off", "on", "online", "offline", "true", "false"),
             "{metrics.wandb} is the name of the project at Weights & Biases",
             'use e.g. "meshtrain", with WANDB_MODE=offline in the environment to write it for later, or "" for none'),
    _check_profile,
)
# Checks that read [mesh], [context], [pipeline] or a key of [training] that a layout sets. A search over layouts makes
# the others once for each rule file.
OF_LAYOUT: tuple[Check, ...] = (_check_mesh, conflicts.MICROBATCHES, _check_clip)
APART_FROM_LAYOUT: tuple[Check, ...] = tuple(check for check in CHECKS if check not in OF_LAYOUT)


def note_custom(run: Run) -> list[str]:
    """Return messages about the run's own code that the cost formulas leave out."""
    left_out = {"training.objective": "what it computes besides the model's head",
                "model.activation": "its elementwise work if it differs from that of swiglu or gelu",
                "model.custom": "what a mixer without `price` computes and saves besides its weight matrices"}
    return [f'{key}="{value}": cost formulas (MFU, plan) leave out {what}; inspect prices the compiled program'
            for key, value, _ in named.values(run) for name, what in left_out.items() if key.startswith(name)]


def notes(run: Run) -> list[str]:
    """Return warnings about valid settings that are rarely intended. The warnings are logged once before the run
    starts."""
    lines = layouts.notes(run) + unused.messages(run) + note_custom(run)
    if not any(getattr(run, section).model_fields_set for section in ("model", "training", "optimizer")):
        lines.append("the run file sets nothing in [model], [training] or [optimizer]: it trains the default model")
    if run.model.vocab_size > 16 * BYTE_VOCAB and _reads_bytes(run):
        lines.append(f'data.tokenizer="bytes" uses {BYTE_VOCAB} of model.vocab_size={run.model.vocab_size} ids; '
                     "give data.tokenizer the path of the model's tokenizer.json")
    if run.data.packing == "stream" and "chat" in {one.source for one in run.data.mixture or [run.data]}:
        lines.append('data.packing="stream" cuts conversations at the end of sequences, so some answers have '
                     'no question; data.packing="whole" keeps them together')
    if (source := run.checkpoint.init_from) and not addresses.is_remote(source) and not os.path.isdir(source):
        lines.append(f"checkpoint.init_from={toml(source)} is not there yet; train it first")
    if run.lora.rank and not run.checkpoint.init_from:
        lines.append(f"lora.rank={run.lora.rank} without checkpoint.init_from freezes random weights")
    if run.lora.rank and run.experts.bias_rate:
        lines.append(f"experts.bias_rate={run.experts.bias_rate} has no effect: lora.rank={run.lora.rank} freezes the "
                     "routers and their biases")
    if run.lora.rank and run.model.param_dtype == "float32" != run.model.compute_dtype:
        lines.append('model.param_dtype="float32" stores the frozen weights in 4 bytes each; "bfloat16" takes 2, and '
                     'keeps every bit of a bfloat16 folder')
    return lines


def mesh_sizes(run: Run, device_count: int, enough: str = "mesh.simulated_devices={} to try it on the CPU") -> dict[
        str, int]:
    """Return the size of every axis on `device_count` devices, with -1 resolved. enough: the remedy in the message; {}
    stands for the number of devices that the mesh needs. Raises: ConfigError if the mesh does not fill the devices."""
    sizes = {axis: getattr(run.mesh, axis) for axis in AXES}
    product = " × ".join(f"mesh.{axis}={size}" for axis, size in sizes.items() if size != 1) or "a mesh of 1"
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if -1 in sizes.values():
        if device_count % fixed or device_count == 0:
            raise ConfigError(f"{product} cannot fill {device_count} devices: not a multiple of {fixed}; use e.g. "
                              f"{next_multiple(max(device_count, 1), fixed)} devices, or axes whose product divides "
                              f"{device_count}")
        return {axis: device_count // fixed if size == -1 else size for axis, size in sizes.items()}
    if fixed != device_count:
        remedy = _mesh_remedy(sizes, fixed, device_count)
        raise ConfigError(f"{product} takes {fixed} devices, and there are {device_count}; {remedy}or "
                          f"{enough.format(fixed)}")
    return sizes


def _mesh_remedy(sizes: dict[str, int], fixed: int, device_count: int) -> str:
    for axis in ("fsdp", "data", "tensor"):
        if device_count % (fixed // sizes[axis]) == 0:
            return f"use mesh.{axis}={device_count * sizes[axis] // fixed} (or -1: all devices that are left), "
    return f"use axes whose product is {device_count}, "
