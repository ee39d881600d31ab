"""Keys that have no effect in a run as it is: told, for whoever gives one means something by it.

EFFECTS is the whole rule: a key, when it has an effect, and what would give it one. Keys that contradict each other are
refused by `checks`; a key with its default is never told, and neither is one that a model folder has decided.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable

from meshtrain.config.messages import SECTIONS, toml
from meshtrain.config.sections import Run
from meshtrain.huggingface import folder


@dataclasses.dataclass(frozen=True)
class Effect:
    """key: section.key. when: whether it has an effect in a run. remedy: what gives it one."""
    key: str
    when: Callable[[Run], bool]
    remedy: str


def _caches_tokens(run: Run) -> bool:
    """Text that is plain and is trained on as bytes is read where it is; which files a glob finds is not known here."""
    named = [*(run.data.mixture or [run.data]), *run.data.validation_sources]
    paths = [path for one in named for path in (*one.paths, *one.validation_paths)]
    return (run.data.tokenizer != "bytes" or any(one.source not in ("stdlib", "text") for one in named)
            or any(path.endswith((".gz", ".zst", "*", "?", "]")) for path in paths))


EFFECTS = (
    Effect("optimizer.decay_steps", lambda run: run.optimizer.schedule == "wsd",
           'optimizer.schedule="wsd" ends with such a decay'),
    Effect("optimizer.final_fraction", lambda run: run.optimizer.schedule != "constant",
           'optimizer.schedule="cosine", "linear" or "wsd"'),
    Effect("training.spike_threshold", lambda run: run.training.loss_spike != "off",
           'training.loss_spike="warn", "skip" or "rollback"'),
    Effect("data.cache", _caches_tokens, "a data.tokenizer other than bytes, or files that are not plain text"),
    Effect("lora.export", lambda run: run.checkpoint.export != "off", 'checkpoint.export="last" or "every"'),
    Effect("lora.alpha", lambda run: run.lora.rank > 0, "lora.rank larger than 0"),
    Effect("model.rope_theta", lambda run: run.model.position == "rope", 'model.position="rope"'),
    Effect("model.rope_scaling", lambda run: run.model.position == "rope", 'model.position="rope"'),
)


def told(run: Run) -> list[str]:
    """A line for each key that is not at its default and has no effect."""
    by_folder = folder.is_one(run.checkpoint.init_from)
    found = []
    for effect in EFFECTS:
        section, key = effect.key.split(".")
        value = getattr(getattr(run, section), key)
        if value == SECTIONS[section].model_fields[key].default or effect.when(run) or by_folder and section == "model":
            continue
        found.append(f"{effect.key}={toml(value)} has no effect here; what gives it one: {effect.remedy}")
    return found
