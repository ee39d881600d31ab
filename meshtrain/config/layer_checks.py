"""Checks of the layers: their patterns, and the keys that mixers, heads, recurrences and routers read."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from meshtrain import pattern
from meshtrain.config import rope_scaling
from meshtrain.config.conflicts import EXPERTS
from meshtrain.config.messages import join, next_multiple, toml
from meshtrain.config.sections import MixerKeys, Model, Run
from meshtrain.pattern import MIXERS, MLPS

EXPERT_KEYS = ("experts_per_token", "expert_mlp_dim", "shared_expert_dim", "shared_expert_gate", "router_score",
               "router_normalize", "router_scale", "router_groups", "router_bias")


def check_layers(run: Run) -> Iterator[str]:
    """Check the layers' patterns and the keys that their mixers read."""
    model = run.model
    known: dict[str, Iterable[str]] = {"mixers": MIXERS, "mlps": MLPS}
    for key, letters in known.items():
        given = getattr(model, key)
        if not given.rstrip("*") or set(given.removesuffix("*")) - set(letters):
            yield (f"model.{key}={toml(given)} is not a pattern of {join(map(toml, letters), 'and')}, with * at its "
                   f"end to repeat the last one; use e.g. {toml('WWWF' if key == 'mixers' else 'de*')}")
            return
    kinds = pattern.kinds(model)
    present = [letter for letter in MIXERS if letter in pattern.present(model)]
    if ("..") in map("".join, kinds):
        yield (f"model.mixers={toml(model.mixers)} and model.mlps={toml(model.mlps)} give a layer neither a mixer nor "
               "an MLP; use a smaller model.num_layers")
    of = {letter: model.of(letter) for letter in present}
    windowed = [letter for letter in present if MIXERS[letter].windowed]
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
        yield (f"model.window={model.window} has no effect, because no layer of model.mixers={toml(model.mixers)} has "
               "a window; use W or V in the pattern, or leave the window out")
    yield from rope_scaling.problems(model)
    for letter in present:
        if MIXERS[letter].attends:
            yield from _check_heads(of[letter], f"model.kinds.{letter}: " * (of[letter] is not model))
    if recurrent := [letter for letter in present if MIXERS[letter].recurs]:
        yield from _check_recurrent(model, recurrent)
    elif model.linear != type(model.linear)() and not pattern.has(model, pattern.CUSTOM):
        yield (f"model.linear={toml(model.linear)} has no effect, because model.mixers={toml(model.mixers)} has no "
               "recurrent layer; use G, K or M in the pattern, or leave it out")
    for letter in present:
        if MIXERS[letter].family == pattern.CUSTOM and not getattr(model.custom, letter):
            yield (f"model.mixers={toml(model.mixers)} uses the mixer {letter}, which has no class; give model.custom, "
                   f'e.g. {{{letter} = "mixers.py:Mixer"}}')
    if idle := [letter for letter, _ in model.custom if letter not in present]:
        yield (f"model.custom has {join(idle, 'and')}, but no layer of model.mixers={toml(model.mixers)} uses it; "
               f"leave it out")
    experts = any(kind.mlp == "e" for kind in kinds)
    if experts and not model.num_experts:
        yield (f"model.mlps={toml(model.mlps)} has layers with experts, but model.num_experts=0; set it, e.g. 8, or "
               f"use d")
    if model.num_experts and not experts:
        yield (f"model.num_experts={model.num_experts} has no effect, because no layer of "
               f"model.mlps={toml(model.mlps)} has experts; use e in the pattern, or leave num_experts out")


def _kind_keys(letter: str) -> set[str]:
    """Return the keys of model.kinds that layers of a mixer read."""
    heads = set(MixerKeys.model_fields) - {"norm_placement", "window", "rope_theta", "rope_scaling"}
    return {"norm_placement"} | (heads if MIXERS[letter].attends else set()) | (
        {"window"} if MIXERS[letter].windowed else set()) | (
        {"rope_theta", "rope_scaling"} if MIXERS[letter].rotated else set())


def _check_heads(cfg: Model, prefix: str) -> Iterator[str]:
    """Check the heads of one mixer. cfg: the section of the mixer. prefix: the first words of each message, with the
    mixer's name."""
    if cfg.num_heads % cfg.num_kv_heads:
        divisors = [n for n in range(1, min(cfg.num_heads, 1024) + 1) if cfg.num_heads % n == 0]
        yield (f"{prefix}model.num_kv_heads={cfg.num_kv_heads} does not divide model.num_heads={cfg.num_heads}; use "
               f"{join(map(str, divisors), 'or')}")
    if cfg.head_dim == 0:
        yield (f"{prefix}model.embed_dim={cfg.embed_dim} cannot be split over model.num_heads={cfg.num_heads}; "
               f"use a multiple, e.g. {next_multiple(cfg.embed_dim, cfg.num_heads)}, or give model.head_dim")
    latent = cfg.latent
    if latent.kv_dim and cfg.num_kv_heads != cfg.num_heads:
        yield (f"{prefix}model.num_kv_heads={cfg.num_kv_heads}: with model.latent every query head has its own keys "
               f"and values; leave it out")
    if latent.kv_dim and not 0 < latent.rope_dim < cfg.head_dim:
        yield (f"{prefix}model.latent.rope_dim={latent.rope_dim} must be above 0 and below "
               f"model.head_dim={cfg.head_dim}; use e.g. {max(2, cfg.head_dim // 6 * 2)}")
    beside = ("qk_norm", "attention_gate", "attention_sinks", "tie_values")
    if latent.kv_dim and (given := [key for key in beside if getattr(cfg, key) not in ("off", False)]):
        yield (f"{prefix}model.latent={toml(latent)} excludes {join((f'model.{key}' for key in given), 'and')}; leave "
               f"{'it' if len(given) == 1 else 'them'} out")
    if cfg.tie_values and cfg.qk_norm == "all_heads":
        yield f'{prefix}model.tie_values=true needs model.qk_norm="off", "head" or "head_and_values"'


def _check_recurrent(model: Model, letters: Sequence[str]) -> Iterator[str]:
    linear, named = model.linear, f"model.mixers={toml(model.mixers)} has recurrent layers ({join(letters, 'and')})"
    if not linear.key_heads or not linear.value_heads:
        yield (f"{named} without heads; give model.linear, e.g. "
               f"{{key_heads = 2, value_heads = 4, key_dim = 64, value_dim = 64}}")
    elif linear.value_heads % linear.key_heads or "K" in letters and linear.value_heads != linear.key_heads:
        yield (f"{named} with model.linear.key_heads={linear.key_heads} and value_heads={linear.value_heads}; make "
               "value_heads a multiple of key_heads, or equal to it for K")


def check_experts(run: Run) -> Iterator[str]:
    """Check the experts. In a model without experts, check that no key is given that only experts read."""
    model, default = run.model, type(run.model)()
    E, K = model.num_experts, model.experts_per_token
    if not E:
        given = [f"model.{key}={toml(getattr(model, key))}" for key in EXPERT_KEYS
                 if getattr(model, key) != getattr(default, key)]
        given += [f"experts.{key}={toml(value)}" for key, value in run.experts
                  if value != getattr(type(run.experts)(), key)]
        if given:
            yield (f"{join(given, 'and')}: the model has no experts (model.num_experts=0); set num_experts, e.g. 8, or "
                   "leave this out")
        return
    if K > E:
        yield f"model.experts_per_token={K} is more than model.num_experts={E}; use at most {E}"
    if model.router_groups:
        yield from _check_groups(model)
    for check in EXPERTS:
        yield from check(run)


def _check_groups(model: Model) -> Iterator[str]:
    E, K, given = model.num_experts, model.experts_per_token, f"model.router_groups={toml(model.router_groups)}"
    groups, limit = (*model.router_groups, 0, 0)[:2]
    if len(model.router_groups) != 2 or not 1 <= limit <= groups:
        yield f"{given} is not [number of groups, groups that a token may use]; use e.g. [8, 4], or leave it out"
    elif E % groups:
        yield (f"{given}: {groups} groups do not divide model.num_experts={E}; use a divisor, e.g. "
               f"{max(n for n in range(1, min(groups, E, 1024) + 1) if E % n == 0)}")
    elif K <= E < K * groups // limit:
        yield (f"model.experts_per_token={K} is more than the {limit} × {E // groups} experts that {given} lets a "
               f"token use; raise the second number to at least {-(-K * groups // E)}")
