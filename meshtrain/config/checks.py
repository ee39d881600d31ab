"""Checks across the keys of a run file, run before anything is started."""

from __future__ import annotations

import difflib
import math
import os
import re
import sys
from pathlib import Path

from meshtrain import pattern
from meshtrain.config import layouts, rope_scaling, unused
from meshtrain.pattern import MIXERS, MLPS
from meshtrain.config.messages import ConfigError, choices, join, next_multiple, toml, unknown_name
from meshtrain.config.sections import Component, Data, Mesh, MixerKeys, Model, Run, source_of
from meshtrain.huggingface import folder
from meshtrain.names import AXES, LORA_TARGETS
from meshtrain.shipped import names
from meshtrain.storage import addresses, copies

# The run file's key that sets the size of each logical axis, for messages.
SIZE_KEYS = {"batch": "data.global_batch / training.microbatches", "seq": "data.seq_len",
             "residual_seq": "data.seq_len",
             "embed": "model.embed_dim", "heads": "model.num_heads", "kv_heads": "model.num_kv_heads",
             "head_dim": "model.head_dim", "mlp": "model.mlp_dim", "vocab": "model.vocab_size (padded to 256)",
             "layers": "model.num_layers", "expert": "model.num_experts", "expert_embed": "model.embed_dim",
             "expert_mlp": "model.expert_mlp_dim"}
FIELD_SOURCES = ("jsonl", "parquet", "arrow")     # sources whose documents have their text in data.field
BYTE_VOCAB = 257  # 256 bytes and the separator between documents


def problems(run: Run) -> list[str]:
    """Return messages about keys that contradict each other or the files they name; empty if the run is valid."""
    return [*_text_problems(run), *_address_problems(run), *_run_problems(run), *_mesh_problems(run),
            *_model_problems(run), *_expert_problems(run), *_data_problems(run),
            *_training_problems(run), *_clip_problems(run), *_lora_problems(run), *_preference_problems(run),
            *_rl_problems(run), *_distributed_problems(run), *_metrics_problems(run)]


def _strings(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _strings(one)
    elif isinstance(value, Component):
        yield from _strings([item for _, item in value])


def _text_problems(run: Run):
    """Report text that UTF-8 cannot encode, paths that this locale cannot encode, and unknown home directories."""
    for section, table in run:
        for key, value in table:
            name = f"{section}.{key}"
            for text in _strings(value):
                try:
                    text.encode()
                except UnicodeEncodeError:
                    yield (f"{name}={ascii(text)} is not UTF-8, but config.toml must be; rename the file, or name it "
                           f"by a link or a glob"
                           if sys.getfilesystemencoding() == "utf-8" else
                           f"{name}={ascii(text)} is not text in this locale ({sys.getfilesystemencoding()}); set "
                           f"PYTHONUTF8=1, or LC_ALL=C.UTF-8")
                    continue
                if name not in PATHS:
                    continue
                if "\0" in text:
                    yield f"{name}={toml(text)} has a null character, which file names cannot contain; remove it"
                    continue
                try:
                    os.fsencode(text)
                except UnicodeEncodeError:
                    yield (f"{name}={ascii(text)} cannot be the name of a file in this locale "
                           f"({sys.getfilesystemencoding()}); set PYTHONUTF8=1, or LC_ALL=C.UTF-8")
                if text.startswith("~") and name != "run.compilation_cache" and not os.path.exists(text):
                    yield (f"{name}={toml(text)} has an unknown home directory (HOME is not set, or there is no such "
                           f"user); write the full path")


# Keys that name files and directories.
PATHS = ("run.dir", "run.compilation_cache", "sharding.rules", "data.paths", "data.validation_paths",
         "data.tokenizer", "data.chat_template",
         "data.cache", "checkpoint.init_from", "checkpoint.local_dir", "rl.rules")


# READ: keys that may name files at addresses. WRITTEN: keys that name directories to which the run writes.
READ = ("run.dir", "data.paths", "data.validation_paths", "data.mixture", "data.validation_sources", "data.tokenizer",
        "data.chat_template", "checkpoint.init_from")
WRITTEN = ("data.cache", "checkpoint.local_dir")


def _address_problems(run: Run):
    """Report addresses of an unknown form, addresses with secrets, and addresses where a directory is needed."""
    for section, table in run:
        for key, value in table:
            name = f"{section}.{key}"
            for text in filter(addresses.is_remote, _strings(value) if name in READ + WRITTEN else ()):
                if name in WRITTEN:
                    yield (f"{name}={toml(addresses.shown(text))} is an address, but must be a directory; "
                           f"mount it, or name a directory that all hosts have")
                    continue
                try:
                    if addresses.parse(text).scheme not in addresses.BUCKETS and name == "run.dir":
                        yield (f"run.dir={toml(addresses.shown(text))} cannot be written; give a directory, or an "
                               f"address in a bucket, s3://BUCKET/… or gs://BUCKET/…")
                except addresses.StorageError as error:
                    yield f"{name}: {error}"


def _run_problems(run: Run):
    name, source = run.run.name, run.checkpoint.init_from
    if not re.fullmatch(r"[\w.+-]+( [\w.+-]+)*", name) or not name.strip("."):
        yield f"run.name={toml(name)} is not a plain name; use letters, digits, - and _, and run.dir for a path"
    if addresses.is_remote(run.run.dir):
        if run.rl.lag:
            yield (f"rl.lag={run.rl.lag}: separate samplers need a directory that all hosts share, but "
                   f"run.dir={toml(run.run.dir)} is an address; give a directory, or rl.lag=0")
    if (keep_every := run.checkpoint.keep_every) and (not (every := run.checkpoint.every) or keep_every % every):
        yield (f"checkpoint.keep_every={keep_every} needs a checkpoint every {keep_every} steps, but they are saved "
               f"every checkpoint.every={every} steps" + (f"; use a multiple of {every}, e.g. "
               f"{-(-keep_every // every) * every}" if every else " (0: only the last); give both, e.g. both "
               f"{keep_every}"))
    local_dir, every = run.checkpoint.local_dir, run.checkpoint.local_every
    if bool(local_dir) != bool(every):
        yield (f'checkpoint.local_every={every} and checkpoint.local_dir={toml(local_dir)} belong together (how often '
               'and where); give both, e.g. 20 and "/dev/shm/meshtrain", or neither')
    elif local_dir and Path(local_dir).resolve().is_relative_to(Path(run.run.dir).resolve()):
        yield (f"checkpoint.local_dir={toml(local_dir)} is in run.dir={toml(run.run.dir)}, which all hosts share; give "
               f"a directory on each host, e.g. /dev/shm/meshtrain")
    if run.checkpoint.init_optimizer and not source:
        yield ("checkpoint.init_optimizer=true loads the optimizer's state of another run, but checkpoint.init_from "
               "is empty; give its run.dir, or leave init_optimizer out")
    if not source:
        return
    if addresses.is_remote(source):
        if source.rstrip("/") == run.run.dir.rstrip("/"):
            yield (f"checkpoint.init_from={toml(source)} is this run's own run.dir; give the new run another one, or "
                   f"leave init_from out to resume the old run")
        elif copies.is_run(source):
            return
        elif not folder.is_one(source):
            yield (f"checkpoint.init_from={toml(source)} has neither config.json nor config.toml: it is neither a "
                   f"model folder nor a run directory; give one of them")
        elif run.checkpoint.init_optimizer:
            yield (f"checkpoint.init_optimizer=true: checkpoint.init_from={toml(source)} is a model folder, which has "
                   f"no optimizer's state; leave init_optimizer out")
    elif not os.path.isdir(source):
        if Path(source).parts[:1] == ("runs",):     # may not exist yet; train looks for its checkpoint
            return
        yield (f"checkpoint.init_from={toml(source)} is not a directory; give the run.dir or the model folder to "
               f"start from")
    elif run.checkpoint.init_optimizer and folder.is_one(source):
        yield (f"checkpoint.init_optimizer=true: checkpoint.init_from={toml(source)} is a model folder, which has no "
               f"optimizer's state; leave init_optimizer out")
    elif Path(source).resolve() == Path(run.run.dir).resolve():
        yield (f"checkpoint.init_from={toml(source)} is this run's own run.dir={toml(run.run.dir)}; "
               "give the new run another run.name, or leave init_from out to resume the old run")


def _mesh_problems(run: Run):
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
    rules = run.sharding.rules
    if not os.path.isfile(rules):      # False also for a name that no file system allows
        known = names("sharding_rules")
        near = difflib.get_close_matches(Path(rules).stem, known, n=1)
        remedy = f"did you mean sharding_rules/{near[0]}.toml?" if near else f"shipped are {join(known, 'and')}"
        yield f"sharding.rules={toml(rules)} is not a file; {remedy}"


def _model_problems(run: Run):
    model, seq_len = run.model, run.data.seq_len
    if model.position == "learned" and seq_len > model.max_seq_len:
        yield (f"data.seq_len={seq_len} is longer than the model.max_seq_len={model.max_seq_len} learned positions; "
               "shorten the sequences or lengthen the table")
    yield from _layer_problems(model)
    if model.matmul_dtype == "bfloat16" != model.compute_dtype:
        yield (f'model.matmul_dtype="bfloat16" differs from model.compute_dtype={toml(model.compute_dtype)}, the dtype '
               f'of all matmuls except float8; use model.compute_dtype="bfloat16", or "auto"')
    if model.vocab_size < BYTE_VOCAB and _reads_bytes(run):
        yield (f"model.vocab_size={model.vocab_size} is too small for data.source={toml(run.data.source)}, "
               f"which has 256 bytes and a separator; use at least {BYTE_VOCAB}")


def _kind_keys(letter: str) -> set[str]:
    """Return the keys of model.kinds that layers of a mixer read."""
    heads = set(MixerKeys.model_fields) - {"norm_placement", "window", "rope_theta", "rope_scaling"}
    return {"norm_placement"} | (heads if letter in pattern.ATTENTION else set()) | (
        {"window"} if letter in pattern.WINDOWED else set()) | (
        {"rope_theta", "rope_scaling"} if letter in pattern.ROTATED else set())


def _layer_problems(model):
    """Report faults of the layers' patterns and of the keys that their mixers read."""
    known = {"mixers": MIXERS, "mlps": MLPS}
    for key, letters in known.items():
        given = getattr(model, key)
        if not given.rstrip("*") or set(given.removesuffix("*")) - set(letters):
            yield (f"model.{key}={toml(given)} is not a pattern of {join(map(toml, letters), 'and')}, with * at its "
                   f"end to repeat the last one; use e.g. {toml('WWWF' if key == 'mixers' else 'de*')}")
            return
    kinds = pattern.kinds(model)
    present = [letter for letter in MIXERS if any(kind.mixer == letter for kind in kinds)]
    if ("..") in map("".join, kinds):
        yield (f"model.mixers={toml(model.mixers)} and model.mlps={toml(model.mlps)} give a layer neither a mixer nor "
               f"an MLP; use fewer model.num_layers")
    of = {letter: model.of(letter) for letter in present}
    windowed = [letter for letter in present if letter in pattern.WINDOWED]
    if idle := [letter for letter, _ in model.kinds if letter not in present]:
        yield (f"model.kinds has {join(map(toml, idle), 'and')}, but no layer of model.mixers={toml(model.mixers)} "
               f"uses it; leave it out")
    for letter, keys in model.kinds:
        reads = _kind_keys(letter)
        if unread := [key for key, _ in keys if key not in reads]:
            yield (f"model.kinds.{letter} has {join(unread, 'and')}, which layers of {letter} do not read; leave "
                   f"{'it' if len(unread) == 1 else 'them'} out")
    if any(not of[letter].window for letter in windowed):
        yield (f"model.mixers={toml(model.mixers)} has layers with a window ({join(windowed, 'and')}) and no "
               f"model.window; give one, or use F and N")
    if model.window and not windowed:
        yield (f"model.window={model.window} is used by no layer of model.mixers={toml(model.mixers)}; use W or V in "
               f"the pattern, or leave the window out")
    yield from rope_scaling.problems(model)
    for letter in present:
        if letter in pattern.ATTENTION:
            yield from _head_problems(model, of[letter], f'model.kinds.{letter}: ' * (of[letter] is not model))
    if recurrent := [letter for letter in present if letter in pattern.RECURRENT]:
        yield from _recurrent_problems(model, recurrent)
    elif model.linear != type(model.linear)():
        yield (f"model.linear={toml(model.linear)} is used by no layer of model.mixers={toml(model.mixers)}; use G, K "
               f"or M in the pattern, or leave it out")
    experts = any(kind.mlp == "e" for kind in kinds)
    if experts and not model.num_experts:
        yield (f"model.mlps={toml(model.mlps)} has layers with experts, but model.num_experts=0; set it, e.g. 8, or "
               f"use d")
    if model.num_experts and not experts:
        yield (f"model.num_experts={model.num_experts}: no layer of model.mlps={toml(model.mlps)} has experts; use e "
               f"in the pattern, or leave them out")


def _head_problems(model: Model, cfg: Model, of: str):
    """Report faults of the heads of one mixer. cfg: its section; of: its name, for messages."""
    if cfg.num_heads % cfg.num_kv_heads:
        divisors = [n for n in range(1, min(cfg.num_heads, 1024) + 1) if cfg.num_heads % n == 0]
        yield (f"{of}model.num_kv_heads={cfg.num_kv_heads} does not divide model.num_heads={cfg.num_heads}; use "
               f"{join(map(str, divisors), 'or')}")
    if cfg.head_dim == 0:
        yield (f"{of}model.embed_dim={cfg.embed_dim} cannot be split over model.num_heads={cfg.num_heads}; "
               f"use a multiple, e.g. {next_multiple(cfg.embed_dim, cfg.num_heads)}, or give model.head_dim")
    latent = cfg.latent
    if latent.kv_dim and cfg.num_kv_heads != cfg.num_heads:
        yield (f"{of}model.num_kv_heads={cfg.num_kv_heads}: with model.latent every query head has its own keys and "
               f"values; leave it out")
    if latent.kv_dim and not 0 < latent.rope_dim < cfg.head_dim:
        yield (f"{of}model.latent.rope_dim={latent.rope_dim} must be above 0 and below model.head_dim={cfg.head_dim}; "
               f"use e.g. "
               f"{max(2, cfg.head_dim // 6 * 2)}")
    beside = ("qk_norm", "attention_gate", "attention_sinks", "tie_values")
    if latent.kv_dim and (given := [key for key in beside if getattr(cfg, key) not in ("off", False)]):
        yield (f"{of}model.latent={toml(latent)} excludes {join((f'model.{key}' for key in given), 'and')}; leave "
               f"{'it' if len(given) == 1 else 'them'} out")
    if cfg.tie_values and cfg.qk_norm == "all_heads":
        yield f'{of}model.tie_values=true needs model.qk_norm="off", "head" or "head_and_values"'


def _recurrent_problems(model, letters):
    linear, named = model.linear, f"model.mixers={toml(model.mixers)} has recurrent layers ({join(letters, 'and')})"
    if not linear.key_heads or not linear.value_heads:
        yield (f"{named} without heads; give model.linear, e.g. "
               f"{{key_heads = 2, value_heads = 4, key_dim = 64, value_dim = 64}}")
    elif linear.value_heads % linear.key_heads or "K" in letters and linear.value_heads != linear.key_heads:
        yield (f"{named} with model.linear.key_heads={linear.key_heads} and value_heads={linear.value_heads}; use "
               f"a multiple of key_heads as value_heads, and the same number with K")


EXPERT_KEYS = ("experts_per_token", "expert_mlp_dim", "shared_expert_dim", "shared_expert_gate",
               "router_score", "router_normalize",
               "router_scale", "router_groups", "router_bias")


def _expert_problems(run: Run):
    model, default = run.model, type(run.model)()
    E, K = model.num_experts, model.experts_per_token
    if not E:
        given = [f"model.{key}={toml(getattr(model, key))}" for key in EXPERT_KEYS
                 if getattr(model, key) != getattr(default, key)]
        given += [f"experts.{key}={toml(value)}" for key, value in run.experts
                  if value != getattr(type(run.experts)(), key)]
        if given:
            yield (f"{join(given, 'and')}: the model has no experts (model.num_experts=0); give it some, e.g. 8, or "
                   f"leave this out")
        return
    if K > E:
        yield f"model.experts_per_token={K} is more than model.num_experts={E}; use at most {E}"
    if model.router_groups:
        yield from _group_problems(model)
    if model.shared_expert_gate and not model.shared_expert_dim:
        yield "model.shared_expert_gate=true: there is no shared MLP; give model.shared_expert_dim, or leave it out"
    if run.experts.bias_rate and model.router_bias == "logits":
        yield (f'experts.bias_rate={run.experts.bias_rate} moves biases that affect only the choice, but '
               f'model.router_bias="logits" has none; leave one out')
    if run.experts.bias_rule != "sign" and not run.experts.bias_rate:
        yield (f'experts.bias_rule="{run.experts.bias_rule}": no bias moves with experts.bias_rate=0; give it, e.g. '
               f'0.02, or leave this out')
    if source := folder.is_one(run.checkpoint.init_from) and run.checkpoint.init_from:
        if run.experts.bias_rate and not _has_choice_bias(source):
            yield (f"experts.bias_rate={run.experts.bias_rate} moves biases of the routers, but "
                   f"checkpoint.init_from={toml(source)}, a model folder, has none; leave it out")
    if run.experts.bias_warmup and not run.experts.bias_rate:
        yield (f"experts.bias_warmup={run.experts.bias_warmup}: no bias moves with experts.bias_rate=0; give it, e.g. "
               f"0.001, or leave this out")
    if run.experts.bias_warmup and run.lora.rank:
        yield (f"experts.bias_warmup={run.experts.bias_warmup}: biases are frozen with lora.rank={run.lora.rank}; "
               f"leave it out")
    if run.experts.bias_warmup and run.checkpoint.init_optimizer:
        yield (f"experts.bias_warmup={run.experts.bias_warmup} starts with a fresh optimizer, but "
               f"checkpoint.init_optimizer=true loads another run's; leave one out")


def _has_choice_bias(source: str) -> bool:
    """Return whether a model folder's routers have biases of the choice.

    True if the folder cannot be read, which is reported elsewhere.
    """
    try:
        return folder.settings_of(folder.local(source)).get("router_bias") == "choice"
    except ValueError:
        return True


def _group_problems(model):
    E, K, given = model.num_experts, model.experts_per_token, f"model.router_groups={toml(model.router_groups)}"
    groups, limit = (*model.router_groups, 0, 0)[:2]
    if len(model.router_groups) != 2 or not 1 <= limit <= groups:
        yield f"{given} is not [groups of experts, groups that a token may use]; use e.g. [8, 4], or leave it out"
    elif E % groups:
        yield (f"{given}: {groups} groups do not divide model.num_experts={E}; use a divisor, e.g. "
               f"{max(n for n in range(1, min(groups, E, 1024) + 1) if E % n == 0)}")
    elif K <= E < K * groups // limit:
        yield (f"model.experts_per_token={K} does not fit into {given}, {limit} of {groups} groups with {E // groups} "
               f"experts each; use a limit of at least {-(-K * groups // E)}")


def _reads_bytes(run: Run) -> bool:
    sources = {one.source for one in run.data.mixture or [run.data]}       # "": unknown, which another check reports
    return run.data.tokenizer == "bytes" and not sources <= {"tokens", ""}


def notes(run: Run) -> list[str]:
    """Return warnings about valid settings that are rarely intended. They are logged once before the run starts."""
    found = layouts.notes(run) + unused.messages(run)
    if not any(getattr(run, section).model_fields_set for section in ("model", "training", "optimizer")):
        found.append("the run file has no key of [model], [training] and [optimizer]: the run trains the default model")
    if run.model.vocab_size > 16 * BYTE_VOCAB and _reads_bytes(run):
        found.append(f'data.tokenizer="bytes" uses {BYTE_VOCAB} of model.vocab_size={run.model.vocab_size} ids; '
                     "give data.tokenizer the path of the model's tokenizer.json")
    if run.data.packing == "stream" and "chat" in {one.source for one in run.data.mixture or [run.data]}:
        found.append('data.packing="stream" cuts conversations at the end of sequences, so some answers have '
                     'no question; data.packing="whole" keeps them together')
    if (source := run.checkpoint.init_from) and not addresses.is_remote(source) and not os.path.isdir(source):
        found.append(f"checkpoint.init_from={toml(source)} is not there yet; train it first")
    if run.lora.rank and not run.checkpoint.init_from:
        found.append(f"lora.rank={run.lora.rank} without checkpoint.init_from freezes random weights")
    if run.lora.rank and run.experts.bias_rate:
        found.append(f"experts.bias_rate={run.experts.bias_rate} moves no bias: lora.rank={run.lora.rank} freezes "
                     f"the routers, too")
    if run.lora.rank and run.model.param_dtype == "float32" != run.model.compute_dtype:
        found.append('model.param_dtype="float32" stores the frozen weights in 4 bytes each; "bfloat16" takes 2, and '
                     'keeps every bit of a bfloat16 folder')
    return found


def _data_problems(run: Run):
    data = run.data
    if data.source == "mixture":
        if not data.mixture:
            yield ('data.source="mixture" has no data.mixture; give its sources, e.g. '
                   'data.mixture=[{source="jsonl", paths=["a.jsonl"], weight=0.7}, {source="stdlib", weight=0.3}]')
        names = [one.name or str(i) for i, one in enumerate(data.mixture)]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f'data.mixture has two sources named {toml(name)}; give each its own name'
        for key in ("paths", "field", "validation_paths"):
            if getattr(data, key) != Data.model_fields[key].default:
                yield (f'data.{key}={toml(getattr(data, key))} is not read by data.source="mixture"; '
                       "give it to the sources of data.mixture")
    elif data.mixture:
        yield f'data.mixture is not read by data.source={toml(data.source)}; use data.source="mixture", or leave it out'
    names = [one.name or str(i) for i, one in enumerate(data.validation_sources)]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f'data.validation_sources has two sources named {toml(name)}; give each its own name'
    if data.validation_sources and any(one.validation_paths for one in [data, *data.mixture, *data.validation_sources]):
        yield ("data.validation_sources and validation_paths both say what to validate on; move the "
               "files of validation_paths into a table of data.validation_sources")
    named = [(f"data.mixture[{i}]", one) for i, one in enumerate(data.mixture)] or [("data", data)]
    for key in ("chat_template", "loss_on"):
        if getattr(data, key) != Data.model_fields[key].default and "chat" not in {one.source for _, one in named} and (
                key == "loss_on" or data.source not in ("preferences", "prompts")):
            yield (f'data.{key}={toml(getattr(data, key))} applies only to conversations; use data.source="chat", or '
                   f'leave it out')
    named += [(f"data.validation_sources[{i}]", one) for i, one in enumerate(data.validation_sources)]
    for where, one in named:
        if one.field != Data.model_fields["field"].default and one.source not in (*FIELD_SOURCES, "mixture"):
            yield (f"{where}.field={toml(one.field)} is not read by {where}.source={toml(one.source)}; use "
                   f"{join(map(toml, FIELD_SOURCES), 'or')}, or leave it out")
        if not one.source:
            yield from [_source_problem(where, one)] * bool(one.paths or one is not data)
        elif one.source == "stdlib" and one.paths:
            yield (f'{where}.paths={toml(one.paths)} is not read by {where}.source="stdlib"; leave {where}.source out, '
                   f'or the paths')
        elif one.source not in ("stdlib", "mixture") and not one.paths:
            example = {"text": "data/*.txt", "tokens": "data/*.tokens.npy", "chat": "data/*.jsonl",
                       "preferences": "data/*.jsonl", "prompts": "data/*.jsonl"}.get(one.source, f"data/*.{one.source}")
            yield (f'{where}.source={toml(one.source)} has no {where}.paths to read; use e.g. '
                   f'{where}.paths=["{example}"]')


def missing_data(run: Run) -> list[str]:
    """Return the message for a run to train that names no data. A trained model needs no data."""
    return [] if run.data.source or run.data.paths else [_source_problem("data", run.data)]


def _source_problem(where: str, one: Data | Component) -> str:
    """Return the message for a source that neither its key nor the suffixes of its files name."""
    known = choices(type(one).model_fields["source"])
    if not one.paths:
        return (f'{where}.paths names no files; give some, e.g. ["data/*.jsonl"], or {where}.source="stdlib", which is '
                f"Python's own library")
    several = {source_of((path,)) for path in one.paths} - {""}
    if len(several) > 1:
        return (f"{where}.paths={toml(one.paths)} have several formats ({join(sorted(several), 'and')}), but a source "
                f"has one; make each format a table of data.mixture")
    return (f"{where}.paths={toml(one.paths)} has no suffix of a known format; give {where}.source, one of "
            f"{join(map(toml, [name for name in known if name not in ('stdlib', 'mixture')]), 'and')}")


def _preference_problems(run: Run):
    data, training = run.data, run.training
    dpo, pairs = training.objective == "dpo", data.source == "preferences"
    if dpo and not pairs and data.source:
        yield (f'training.objective="dpo" trains on pairs of answers, but data.source={toml(data.source)} has none; '
               f'use data.source="preferences"')
    if training.dpo_beta != type(training).model_fields["dpo_beta"].default and not dpo:
        yield (f'training.dpo_beta={training.dpo_beta} has no effect with '
               f'training.objective={toml(training.objective)}; use "dpo", or leave it out')
    if dpo and training.z_loss:
        yield f'training.z_loss={training.z_loss} is not part of training.objective="dpo"; use 0'
    if not pairs:
        return
    if not data.document_mask:
        yield ('data.document_mask=false would let the rejected answer see the chosen one (data.source="preferences"); '
               'leave it out')
    for key in ("skip_batches", "validation_paths", "validation_sources"):
        if getattr(data, key) != Data.model_fields[key].default:
            yield (f'data.{key}={toml(getattr(data, key))} is not read by data.source="preferences", which '
                   f'makes a sequence of each pair; leave it out')


def _rl_problems(run: Run):
    data, training, rl = run.data, run.training, run.rl
    learns, prompts = training.objective == "rl", data.source == "prompts"
    if learns != prompts and data.source:
        yield (f'training.objective={toml(training.objective)} and data.source={toml(data.source)}: '
               f'training.objective="rl" and data.source="prompts" need each other; set both, or neither')
    if not learns:
        if given := [f"rl.{key}={toml(value)}" for key, value in rl if value != type(rl).model_fields[key].default]:
            yield (f"{join(given, 'and')}: [rl] is not read by training.objective={toml(training.objective)}; use "
                   f'"rl", or leave it out')
        return
    if not rl.reward:
        yield ('rl.reward is empty, but training.objective="rl" needs a reward; use "exact", "number", '
               '"choice" or "regex", or a function of your own, "rewards.py:score"')
    if rl.max_tokens > data.seq_len:
        yield (f"rl.max_tokens={rl.max_tokens} leaves no room for a prompt in data.seq_len={data.seq_len}; use a "
               f"longer data.seq_len, e.g. {2 * rl.max_tokens}")
    if "" in rl.stop:
        yield 'rl.stop has an empty string, which ends every answer before it begins; leave it out'
    if rl.samples == 1:
        yield (f"rl.samples=1: an advantage compares the answers of a group (rl.advantage={toml(rl.advantage)}), "
               "so a group needs at least two; use e.g. 8")
    if rl.prompts % rl.updates:
        yield (f"rl.updates={rl.updates} does not divide rl.prompts={rl.prompts}: each update uses an equal part; "
               f"use rl.prompts={next_multiple(rl.prompts, rl.updates)}")
    if rl.ratio == "cispo" and rl.dual_clip:
        yield f'rl.dual_clip={rl.dual_clip:g} is not part of rl.ratio="cispo", which clips no loss; leave it out'
    if rl.old == "sampler" and rl.correction != "none":
        yield (f'rl.correction={toml(rl.correction)} compares old log-probabilities with the sampler\'s, but '
               f'rl.old="sampler" uses the same for both; use rl.old="trainer", or no correction')
    if run.model.matmul_dtype == "float8" and rl.correction == "none":
        yield ('model.matmul_dtype="float8" applies only to the training step, because its scales depend on all rows: '
               'answers are generated without it, and log-probabilities differ by 0.25 per token; use '
               'rl.correction="token_truncate", or model.matmul_dtype="auto"')
    if rl.lag and rl.filter != "none":
        yield (f'rl.lag={rl.lag} chooses prompts before the rewards of earlier ones are known, so '
               f'rl.filter={toml(rl.filter)} cannot replace groups; use rl.filter="none", or rl.lag=0')
    if rl.lag and rl.rules:
        yield (f"rl.lag={rl.lag}: separate processes generate answers on their own meshes, but "
               f"rl.rules={toml(rl.rules)} is for the trainer's mesh; leave it out, or use rl.lag=0")
    if rl.kl and not run.checkpoint.init_from:
        yield (f"rl.kl={rl.kl:g} is a divergence from the initial weights, which are random here; give "
               f"checkpoint.init_from, or leave rl.kl out")
    for key in ("embedding_dropout", "residual_dropout"):
        if getattr(run.model, key):
            yield (f'model.{key}={getattr(run.model, key):g}: training.objective="rl" '
                   f'generates answers without dropout and trains on them; use 0')
    if training.z_loss:
        yield f'training.z_loss={training.z_loss} is not part of training.objective="rl"; use 0'
    if run.experts.bias_warmup:
        yield (f"experts.bias_warmup={run.experts.bias_warmup} reads batches before the first step, but "
               f'training.objective="rl" has none yet; use 0')
    if training.loss_spike in ("skip", "rollback"):
        yield (f'training.loss_spike={toml(training.loss_spike)}: the loss of training.objective="rl" is always '
               f'around 0; leave it out')
    if not data.document_mask:
        yield ('data.document_mask=false would let answers see each other (data.source="prompts"); leave it out')
    for key in ("skip_batches", "validation_sources", "packing"):
        if getattr(data, key) != Data.model_fields[key].default:
            yield f'data.{key}={toml(getattr(data, key))} is not read by data.source="prompts"; leave it out'


def _training_problems(run: Run):
    data, training = run.data, run.training
    if data.global_batch % training.microbatches:
        yield (f"data.global_batch={data.global_batch} cannot be split over "
               f"training.microbatches={training.microbatches}; use a multiple, e.g. "
               f"{next_multiple(data.global_batch, training.microbatches)}")
    separate = data.validation_sources or any(one.validation_paths for one in [data, *data.mixture])
    if run.validation.every and not data.validation_fraction and not separate:
        yield (f"validation.every={run.validation.every} has no data, because data.validation_fraction=0 holds none "
               "out; use e.g. data.validation_fraction=0.02, or validation.every=0")
    if training.loss_spike == "rollback" and data.source == "preferences":
        yield ('training.loss_spike="rollback" skips batches, which data.source="preferences" does not support; use '
               '"skip" or "warn"')
    if run.optimizer.schedule == "wsd" and not run.optimizer.decay_steps:
        yield ('optimizer.schedule="wsd" ends with a decay, but optimizer.decay_steps=0; '
               f"use e.g. {max(1, training.steps // 10)}")


def _clip_problems(run: Run):
    if not run.optimizer.qk_clip:
        return
    key, model = f"optimizer.qk_clip={run.optimizer.qk_clip:g}", run.model
    present = {kind.mixer for kind in pattern.kinds(model)} & {*pattern.ATTENTION}
    normed = sorted(mixer for mixer in present if model.of(mixer).qk_norm != "off")
    if not present:
        yield f"{key} clips attention scores, but model.mixers={toml(model.mixers)} has no attention; leave it out"
    elif normed:
        yield (f"{key} scales the weights of queries and keys, but model.qk_norm={toml(model.of(normed[0]).qk_norm)} "
               f"divides by their length, so it has no effect; leave one of them out")
    if model.score_softcap:
        yield f"{key}: model.score_softcap={model.score_softcap:g} already bounds the scores; leave one of them out"
    if run.lora.rank:
        yield f"{key} scales weights that lora.rank={run.lora.rank} freezes; leave one of them out"
    if run.mesh.stage != 1:
        yield (f"{key} needs the largest score of all microbatches, which a pipeline does not store; use "
               f"mesh.stage=1, or leave qk_clip out")


def _lora_problems(run: Run):
    lora = run.lora
    for name in dict.fromkeys(lora.targets):
        if name not in LORA_TARGETS:
            yield unknown_name("lora.targets", name, LORA_TARGETS)
        if lora.targets.count(name) > 1:
            yield f"lora.targets={toml(lora.targets)} names {toml(name)} twice; name it once"
    if not lora.rank and lora.export == "adapters":
        yield 'lora.export="adapters" needs adapters, but lora.rank=0; set a rank, or leave it out'
    if not lora.rank and lora.targets:
        yield (f"lora.targets={toml(lora.targets)} has no effect with lora.rank=0, which trains the whole model; "
               f"give a rank, e.g. 16, or leave the targets out")


def is_address(text: str) -> bool:
    """Return whether text is HOST:PORT. An IPv6 address must be in brackets."""
    port = re.fullmatch(r"(?:[^\s:\[\]]+|\[[0-9a-fA-F:]+\]):(\d{1,5})", text)
    return bool(port) and 0 < int(port[1]) < 65536


def _distributed_problems(run: Run):
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


def _metrics_problems(run: Run):
    if run.metrics.wandb in ("off", "on", "online", "offline", "true", "false"):
        yield (f'metrics.wandb={toml(run.metrics.wandb)} is the name of the project at Weights & Biases; use e.g. '
               f'"meshtrain", with WANDB_MODE=offline in the environment to write it for later, or "" for none')
    steps, name = run.metrics.profile_steps, f"metrics.profile_steps={toml(run.metrics.profile_steps)}"
    if len(steps) not in (0, 2):
        yield f"{name} is not a first and a last step; use e.g. {toml(steps[:1] * 2 or (1, 1))}, or [] for no profile"
    elif steps and not 1 <= steps[0] <= steps[1] <= run.training.steps:
        yield (f"{name} must be steps from 1 to training.steps={run.training.steps}, the first not after the last; "
               f"use e.g. {toml((min(2, run.training.steps),) * 2)}, or [] for no profile")


def mesh_sizes(run: Run, device_count: int, enough: str = "mesh.simulated_devices={} to try it on the CPU") -> dict[
        str, int]:
    """Return the size of every axis on `device_count` devices, with -1 resolved.

    enough: remedy of the message, where {} is the number of devices that the mesh needs. Raises: ConfigError if the
    mesh does not fill the devices.
    """
    sizes = {axis: getattr(run.mesh, axis) for axis in AXES}
    product = " × ".join(f"mesh.{axis}={size}" for axis, size in sizes.items() if size != 1) or "a mesh of 1"
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if -1 in sizes.values():
        if device_count % fixed or device_count == 0:
            raise ConfigError(
                f"{product} cannot fill {device_count} devices: not a multiple of {fixed}; use e.g. "
                f"{next_multiple(max(device_count, 1), fixed)} devices, or axes whose product divides {device_count}"
            )
        return {axis: device_count // fixed if size == -1 else size for axis, size in sizes.items()}
    if fixed != device_count:
        raise ConfigError(
            f"{product} takes {fixed} devices, and there are {device_count}; {_mesh_remedy(sizes, fixed, device_count)}"
            f"or {enough.format(fixed)}"
        )
    return sizes


def _mesh_remedy(sizes: dict[str, int], fixed: int, device_count: int) -> str:
    for axis in ("fsdp", "data", "tensor"):
        if device_count % (fixed // sizes[axis]) == 0:
            return f"use mesh.{axis}={device_count * sizes[axis] // fixed} (or -1: all devices that are left), "
    return f"use axes whose product is {device_count}, "
