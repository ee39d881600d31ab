"""Settings of a run that exclude each other: one row for each conflict, in the order of the messages.

`checks` runs these tables, and the checks that do not fit into a row. A check is a function from a run to its messages;
a row is such a function. Keys that are allowed, but have no effect, are in `unused`.
"""
from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from meshtrain import custom, pattern
from meshtrain.config.messages import SECTIONS, next_multiple, toml
from meshtrain.config.sections import Run
from meshtrain.storage import addresses

Check = Callable[[Run], Iterable[str]]
PLACEHOLDER = re.compile(r"\{([a-z_]+)\.([a-z_]+)(:g)?\}")


@dataclasses.dataclass(frozen=True)
class Conflict:
    """Settings that exclude each other.

    when: whether a run has these settings. because: the settings and the reason. remedy: a text that says what to
    change, or a function of the run that returns the text. {section.key} in a text becomes section.key=value, with the
    value in TOML; {section.key:g} prints a float in its shortest form.
    """
    when: Callable[[Run], object]
    because: str
    remedy: str | Callable[[Run], str]

    def __call__(self, run: Run) -> Iterator[str]:
        """Yield the message if the run has the conflict."""
        if self.when(run):
            remedy = self.remedy if isinstance(self.remedy, str) else self.remedy(run)
            yield f"{_with_values(self.because, run)}; {_with_values(remedy, run)}"


def _with_values(text: str, run: Run) -> str:
    def show(placeholder: re.Match) -> str:
        section, key, short = placeholder.groups()
        value = getattr(getattr(run, section), key)
        return f"{section}.{key}={f'{value:g}' if short else toml(value)}"
    return PLACEHOLDER.sub(show, text)


def is_given(name: str) -> Callable[[Run], bool]:
    """Return a condition: the key differs from its default. name: section.key."""
    section, key = name.split(".")
    default = SECTIONS[section].model_fields[key].default
    return lambda run: getattr(getattr(run, section), key) != default


def _has_local_dir_in_run_dir(run: Run) -> bool:
    local_dir = run.checkpoint.local_dir
    return bool(local_dir and run.checkpoint.local_every
                and Path(local_dir).resolve().is_relative_to(Path(run.run.dir).resolve()))


def _has_validation_data(run: Run) -> bool:
    data = run.data
    return bool(data.validation_fraction or data.validation_sources
                or any(source.validation_paths for source in [data, *data.mixture]))


RUN: tuple[Check, ...] = (
    Conflict(lambda run: not (re.fullmatch(r"[\w.+-]+( [\w.+-]+)*", run.run.name) and run.run.name.strip(".")),
             "{run.name} is not a plain name", "use letters, digits, - and _, and run.dir for a path"),
    Conflict(lambda run: run.rl.lag and addresses.is_remote(run.run.dir),
             "{rl.lag}: separate samplers need a directory that all hosts share, but {run.dir} is an address",
             "give a directory, or rl.lag=0"),
)

CHECKPOINT: tuple[Check, ...] = (
    Conflict(lambda run: bool(run.checkpoint.local_dir) != bool(run.checkpoint.local_every),
             "{checkpoint.local_every} and {checkpoint.local_dir} belong together (how often and where)",
             'give both, e.g. 20 and "/dev/shm/meshtrain", or neither'),
    Conflict(_has_local_dir_in_run_dir,
             "{checkpoint.local_dir} is in {run.dir}, which all hosts share",
             "give a directory on each host, e.g. /dev/shm/meshtrain"),
    Conflict(lambda run: run.checkpoint.init_optimizer and not run.checkpoint.init_from,
             "{checkpoint.init_optimizer} loads the optimizer's state of another run, but checkpoint.init_from is "
             "empty", "give its run.dir, or leave init_optimizer out"),
)

EXPERTS: tuple[Check, ...] = (
    Conflict(lambda run: run.model.shared_expert_gate and not run.model.shared_expert_dim,
             "{model.shared_expert_gate}: there is no shared MLP", "give model.shared_expert_dim, or leave it out"),
    Conflict(lambda run: run.experts.bias_rate and run.model.router_bias == "logits",
             '{experts.bias_rate} moves the biases of router_bias="choice", but {model.router_bias} has trained ones',
             "leave one out"),
    Conflict(lambda run: run.experts.bias_rule != "sign" and not run.experts.bias_rate,
             "{experts.bias_rule} needs experts.bias_rate > 0", "use e.g. bias_rate=0.02, or leave it out"),
    Conflict(lambda run: run.experts.bias_warmup and not run.experts.bias_rate,
             "{experts.bias_warmup} needs experts.bias_rate > 0", "use e.g. bias_rate=0.001, or leave it out"),
    Conflict(lambda run: run.experts.bias_warmup and run.lora.rank,
             "{experts.bias_warmup} has no effect, because {lora.rank} freezes the routers' biases", "leave it out"),
    Conflict(lambda run: run.experts.bias_warmup and run.checkpoint.init_optimizer,
             "{experts.bias_warmup} starts with a new optimizer state, but {checkpoint.init_optimizer} loads another "
             "run's", "leave one out"),
)

MICROBATCHES = Conflict(
    lambda run: run.data.global_batch % run.training.microbatches,
    "{data.global_batch} cannot be split over {training.microbatches}",
    lambda run: f"use a multiple, e.g. {next_multiple(run.data.global_batch, run.training.microbatches)}")

TRAINING: tuple[Check, ...] = (
    Conflict(lambda run: run.validation.every and not _has_validation_data(run),
             "{validation.every} has no data, because data.validation_fraction=0 holds none out",
             "use e.g. data.validation_fraction=0.02, or validation.every=0"),
    Conflict(lambda run: run.training.loss_spike == "rollback" and run.data.source == "preferences",
             'training.loss_spike="rollback" skips batches, which data.source="preferences" does not support',
             'use "skip" or "warn"'),
    Conflict(lambda run: run.optimizer.schedule == "wsd" and not run.optimizer.decay_steps,
             "{optimizer.schedule} ends with a decay, but {optimizer.decay_steps}",
             lambda run: f"use e.g. {max(1, run.training.steps // 10)}"),
    Conflict(lambda run: run.optimizer.offload and (run.optimizer.name == "muon" or any(
                 row.rule == "muon" for row in run.optimizer.groups.rows.values())),
             "{optimizer.offload}: muon needs whole matrices, but moments in host memory are updated shard by shard",
             'use optimizer.name="adamw" or "lion", or leave offload out'),
    Conflict(lambda run: run.optimizer.offload and run.optimizer.name == "adafactor",
             "{optimizer.offload}: {optimizer.name} has no moments of the size of the weights",
             'use optimizer.name="adamw" or "lion", or leave offload out'),
    Conflict(lambda run: run.optimizer.offload and custom.is_path(run.optimizer.name),
             "{optimizer.offload}: {optimizer.name} may read other elements of a weight than the one it updates, but "
             "moments in host memory are updated piece by piece",
             'use optimizer.name="adamw" or "lion", or leave offload out'),
    Conflict(lambda run: run.optimizer.offload and run.lora.rank,
             "{optimizer.offload}: {lora.rank} trains only adapters, whose moments are small",
             "train all weights, or leave offload out"),
)

GROUPS: tuple[Check, ...] = (
    Conflict(lambda run: run.optimizer.groups.preset and not run.optimizer.groups.base,
             'optimizer.groups: preset="mup" divides the learning rate by the width over that of a base model',
             'name the model for which the rate was tuned, e.g. base = "small.toml"'),
    Conflict(lambda run: run.optimizer.groups.base and not run.optimizer.groups.preset,
             "optimizer.groups: base has no effect without a preset", 'add preset = "mup", or leave it out'),
    Conflict(lambda run: run.optimizer.groups.preset and run.lora.rank,
             'optimizer.groups: preset="mup" is for training all weights from their initialization, but {lora.rank} '
             "trains adapters", "leave one of them out"),
)

QK_CLIP: tuple[Check, ...] = (
    Conflict(lambda run: run.model.score_softcap,
             "{optimizer.qk_clip:g}: {model.score_softcap:g} already bounds the scores", "leave one of them out"),
    Conflict(lambda run: run.lora.rank,
             "{optimizer.qk_clip:g} scales weights that {lora.rank} freezes", "leave one of them out"),
    Conflict(lambda run: run.mesh.stage != 1,
             "{optimizer.qk_clip:g} needs the largest score of all microbatches, which a pipeline does not store",
             "use mesh.stage=1, or leave qk_clip out"),
)

MTP: tuple[Check, ...] = (
    Conflict(lambda run: run.model.position == "learned",
             "{model.mtp_layers} feeds later tokens at the positions of earlier ones, so {model.position} would embed "
             "wrong positions", 'use model.position="rope", or model.mtp_layers=0'),
    Conflict(lambda run: not pattern.mixer(pattern.depth_kind(run.model).mixer).attends,
             "{model.mtp_layers} adds layers like the last one with attention, but no layer has it ({model.mixers})",
             "use a pattern with attention, e.g. GGGF, or model.mtp_layers=0"),
    Conflict(lambda run: run.training.mtp_weight and run.lora.rank and "mtp" not in run.lora.also,
             "{training.mtp_weight:g} trains the depths of {model.mtp_layers}, which {lora.rank} freezes",
             'use lora.also=["mtp"], which trains them whole, or training.mtp_weight=0: the depths keep their weights'),
    Conflict(lambda run: run.training.mtp_weight and run.training.objective != "next_token",
             "{training.mtp_weight:g} is not part of {training.objective}, which trains no depths "
             "({model.mtp_layers})", "use training.mtp_weight=0: the depths keep their weights"),
    Conflict(lambda run: run.training.mtp_weight and run.optimizer.qk_clip,
             "{optimizer.qk_clip:g} does not clip the layers of {model.mtp_layers}",
             "use training.mtp_weight=0, or leave qk_clip out"),
)

LORA: tuple[Check, ...] = (
    Conflict(lambda run: run.lora.init_from and run.checkpoint.init_optimizer,
             "{checkpoint.init_optimizer} would load optimizer state that does not belong to the adapters of "
             "{lora.init_from}", "leave one of them out"),
    Conflict(lambda run: not run.lora.rank and run.lora.export == "adapters",
             "{lora.export} needs adapters, but {lora.rank}", "set a rank, or leave it out"),
    Conflict(lambda run: not run.lora.rank and run.lora.targets,
             "{lora.targets} has no effect with {lora.rank}, which trains the whole model",
             "give a rank, e.g. 16, or leave the targets out"),
    Conflict(lambda run: not run.lora.rank and run.lora.also,
             "{lora.also} has no effect with {lora.rank}, which trains the whole model",
             "give a rank, e.g. 16, or leave it out"),
    Conflict(lambda run: run.model.tie_embeddings and "head" in run.lora.also,
             "{lora.also}: the head of this model is its embedding ({model.tie_embeddings})",
             'use lora.also=["embedding"], which trains both'),
    Conflict(lambda run: run.lora.rank and "mtp" in run.lora.also and not (
                 run.model.mtp_layers and run.training.mtp_weight),
             "{lora.also} trains the depths of multi-token prediction, which {model.mtp_layers} and "
             "{training.mtp_weight:g} leave out", 'leave "mtp" out, or make both larger than 0'),
    Conflict(lambda run: run.lora.rank and "mtp" in run.lora.also and run.lora.export == "adapters",
             "{lora.export}: PEFT's format has no names for the depths that {lora.also} trains",
             'use lora.export="merged"'),
    Conflict(lambda run: run.lora.also and run.rl.kl,
             "{rl.kl:g} compares with the model without its adapters, but {lora.also} trains more than adapters",
             "leave one of them out"),
)

DPO: tuple[Check, ...] = (
    Conflict(lambda run: run.training.objective == "dpo" and run.data.source not in ("preferences", ""),
             "{training.objective} trains on pairs of answers, but {data.source} has none",
             'use data.source="preferences"'),
    Conflict(lambda run: run.training.objective != "dpo" and is_given("training.dpo_beta")(run),
             "{training.dpo_beta} has no effect with {training.objective}", 'use "dpo", or leave it out'),
    Conflict(lambda run: run.training.objective == "dpo" and run.training.z_loss,
             "{training.z_loss} is not part of {training.objective}", "use 0"),
)

DISTILL: tuple[Check, ...] = (
    Conflict(lambda run: not run.distill.teacher,
             "distill.teacher is empty, but {training.objective} learns the predictions of a teacher",
             "give a model folder"),
    Conflict(lambda run: run.distill.top_tokens >= run.model.vocab_size,
             "{distill.top_tokens} covers {model.vocab_size}, so no token is left for the class of all others",
             "use fewer, e.g. 64"),
    Conflict(lambda run: run.training.z_loss, "{training.z_loss} is not part of {training.objective}", "use 0"),
    Conflict(lambda run: run.data.source == "preferences",
             "{training.objective} trains on documents or conversations, but {data.source} has pairs",
             "use another source"),
)

PREFERENCES: tuple[Check, ...] = (
    Conflict(lambda run: not run.data.document_mask,
             "{data.document_mask} would let the rejected answer see the chosen one ({data.source})", "leave it out"),
    *(Conflict(is_given(f"data.{key}"),
               f"{{data.{key}}} is not read by {{data.source}}, which makes a sequence of each pair", "leave it out")
      for key in ("skip_batches", "validation_paths", "validation_sources")),
)

RL: tuple[Check, ...] = (
    Conflict(lambda run: not run.rl.reward,
             "rl.reward is empty, but {training.objective} needs a reward",
             'use "exact", "number", "choice" or "regex", or a function of your own, "rewards.py:score"'),
    Conflict(lambda run: run.rl.max_tokens > run.data.seq_len,
             "{rl.max_tokens} leaves no room for a prompt in {data.seq_len}",
             lambda run: f"use a longer data.seq_len, e.g. {2 * run.rl.max_tokens}"),
    Conflict(lambda run: "" in run.rl.stop,
             "rl.stop has an empty string, which ends every answer before it begins", "leave it out"),
    Conflict(lambda run: run.rl.samples == 1,
             "{rl.samples}: an advantage compares the answers of a group ({rl.advantage}), so a group needs at least "
             "two", "use e.g. 8"),
    Conflict(lambda run: run.rl.prompts % run.rl.updates,
             "{rl.updates} does not divide {rl.prompts}: each update uses an equal part",
             lambda run: f"use rl.prompts={next_multiple(run.rl.prompts, run.rl.updates)}"),
    Conflict(lambda run: run.rl.ratio == "cispo" and run.rl.dual_clip,
             "{rl.dual_clip:g} is not part of {rl.ratio}, which clips no loss", "leave it out"),
    Conflict(lambda run: run.rl.old == "sampler" and run.rl.correction != "none",
             "{rl.correction} compares old log-probabilities with the sampler's, but with {rl.old} they are the same",
             'use rl.old="trainer", or no correction'),
    Conflict(lambda run: run.model.matmul_dtype == "float8" and run.rl.correction == "none",
             "{model.matmul_dtype} applies only to the training step, because its scales depend on all rows: answers "
             "are generated without it, and log-probabilities differ by 0.25 per token",
             'use rl.correction="token_truncate", or model.matmul_dtype="auto"'),
    Conflict(lambda run: run.rl.lag and run.rl.filter != "none",
             "{rl.lag} chooses prompts before the rewards of earlier ones are known, so {rl.filter} cannot replace "
             "groups", 'use rl.filter="none", or rl.lag=0'),
    Conflict(lambda run: run.rl.lag and run.rl.rules,
             "{rl.lag}: separate processes generate answers on their own meshes, but {rl.rules} is for the trainer's "
             "mesh", "leave it out, or use rl.lag=0"),
    Conflict(lambda run: run.rl.kl and not run.checkpoint.init_from,
             "{rl.kl:g} is a divergence from the initial weights, which are random here",
             "give checkpoint.init_from, or leave rl.kl out"),
    *(Conflict(is_given(f"model.{key}"),
               f"{{model.{key}:g}}: {{training.objective}} generates answers without dropout and trains on them",
               "use 0") for key in ("embedding_dropout", "residual_dropout")),
    Conflict(lambda run: run.training.ema,
             "{training.ema:g} is an average that {training.objective} neither samples from nor validates",
             "use 0"),
    Conflict(lambda run: run.training.z_loss, "{training.z_loss} is not part of {training.objective}", "use 0"),
    Conflict(lambda run: run.experts.bias_warmup,
             "{experts.bias_warmup} reads batches before the first step, but {training.objective} has none yet",
             "use 0"),
    Conflict(lambda run: run.training.loss_spike in ("skip", "rollback"),
             "{training.loss_spike}: the loss of {training.objective} is always around 0", "leave it out"),
    Conflict(lambda run: not run.data.document_mask,
             '{data.document_mask} would let answers see each other (data.source="prompts")', "leave it out"),
    *(Conflict(is_given(f"data.{key}"), f'{{data.{key}}} is not read by data.source="prompts"', "leave it out")
      for key in ("skip_batches", "validation_sources", "packing")),
)
