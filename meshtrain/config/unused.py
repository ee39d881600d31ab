"""Warns about keys that have no effect in a run.

EFFECTS lists each such key, the condition under which it has an effect, and the remedy. A key that has its default, or
that a model folder sets, is not reported. `conflicts` has keys that contradict each other.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable

from meshtrain.config.messages import SECTIONS, join, toml
from meshtrain.config.sections import Run
from meshtrain.storage import addresses, model_folder

TEXTS = ("text", "jsonl", "parquet", "arrow")       # sources whose documents are divided at data.split_at


@dataclasses.dataclass(frozen=True)
class Effect:
    """A key that has no effect in some runs. key: section.key. when: whether the key has an effect in a run. remedy:
    the setting that gives it one."""
    key: str
    when: Callable[[Run], bool]
    remedy: str


def _caches_tokens(run: Run) -> bool:
    """Return whether the run writes a token cache, or copies of files at addresses. Plain text that is trained on as
    bytes needs neither a cache nor copies. For a glob the result is true, because it may match other files."""
    named = [*(run.data.mixture or [run.data]), *run.data.validation_sources]
    paths = [path for source in named for path in (*source.paths, *source.validation_paths)]
    return (run.data.tokenizer != "bytes" or bool(run.data.split_at)
            or any(source.source not in ("stdlib", "text") for source in named)
            or any(path.endswith((".gz", ".zst", "*", "?", "]")) or addresses.is_remote(path) for path in paths))


EFFECTS = (
    Effect("optimizer.decay_steps", lambda run: run.optimizer.schedule == "wsd",
           'optimizer.schedule="wsd", which ends with such a decay'),
    Effect("optimizer.final_fraction", lambda run: run.optimizer.schedule != "constant",
           'optimizer.schedule="cosine", "linear" or "wsd"'),
    Effect("optimizer.moments_dtype", lambda run: run.optimizer.name != "adafactor",
           'moments of the size of the weights, unlike "adafactor", which keeps rows and columns in float32'),
    Effect("training.spike_threshold", lambda run: run.training.loss_spike != "off",
           'training.loss_spike="warn", "skip" or "rollback"'),
    Effect("data.cache", _caches_tokens, "a data.tokenizer other than bytes, or files that are not plain text or are "
           "at addresses"),
    Effect("data.split_at", lambda run: any(source.source in TEXTS for source in [
           *(run.data.mixture or [run.data]), *run.data.validation_sources]),
           f"data.source={join(map(toml, TEXTS), 'or')}"),
    Effect("experts.balance", lambda run: run.model.num_experts > 0 and run.experts.aux_loss > 0,
           "model.num_experts and experts.aux_loss above 0"),
    Effect("lora.export", lambda run: run.checkpoint.export != "off", 'checkpoint.export="last" or "every"'),
    Effect("metrics.every", lambda run: run.training.objective != "rl" or run.rl.updates > 1,
           "rl.updates above 1, because each batch of answers has its own row"),
    Effect("training.mtp_weight", lambda run: run.model.mtp_layers > 0, "model.mtp_layers larger than 0"),
    Effect("lora.alpha", lambda run: run.lora.rank > 0, "lora.rank larger than 0"),
    Effect("model.rope_theta", lambda run: run.model.position == "rope", 'model.position="rope"'),
    Effect("model.rope_scaling", lambda run: run.model.position == "rope", 'model.position="rope"'),
)


def messages(run: Run) -> list[str]:
    """Return one message for each key that has no effect and does not have its default."""
    by_folder = model_folder.is_at(run.checkpoint.init_from)
    lines = []
    for effect in EFFECTS:
        section, key = effect.key.split(".")
        value = getattr(getattr(run, section), key)
        if value == SECTIONS[section].model_fields[key].default or effect.when(run) or by_folder and section == "model":
            continue
        lines.append(f"{effect.key}={toml(value)} has no effect here; it needs {effect.remedy}")
    return lines
