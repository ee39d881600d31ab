"""The rules of model.rope_scaling."""
from __future__ import annotations

from collections.abc import Iterator

from meshtrain import pattern
from meshtrain.config.messages import join, toml
from meshtrain.config.sections import ROPE_OPTIONS, ROPE_TYPES, Model, RopeScaling

KEYS = tuple(RopeScaling.model_fields)[1:]


def problems(cfg: Model) -> Iterator[str]:
    """Return the faults of the ropes of the [model] section, including those of model.kinds."""
    sections = pattern.rope_mixers(cfg)
    faults = [fault for section in (sections or {"": cfg}).values() for fault in _of_scaling(section.rope_scaling)]
    for mixer, section in sections.items():
        key = f"model.kinds.{mixer}.head_dim" if section.head_dim != cfg.head_dim else "model.head_dim"
        faults += _of_width(section, key)
    yield from dict.fromkeys(faults)


def _of_scaling(rope: RopeScaling) -> Iterator[str]:
    read = dict(rope)
    slow, fast = ("beta_slow", "beta_fast") if rope.rope_type == "yarn" else ("low_freq_factor", "high_freq_factor")
    if slow in read and getattr(rope, fast) <= getattr(rope, slow):
        yield (f"model.rope_scaling={toml(rope)}: {fast} must be larger than {slow}; use e.g. "
               f"{toml(RopeScaling(rope_type=rope.rope_type))}")
    idle = [name for name in KEYS if name not in read and getattr(rope, name) != RopeScaling.model_fields[name].default]
    if idle:
        reads = next(kind for kind, keys in {**ROPE_TYPES, "yarn": (*ROPE_TYPES["yarn"], *ROPE_OPTIONS["yarn"])}.items()
                     if idle[0] in keys)
        yield (f"model.rope_scaling has {join(idle, 'and')}, which rope_type={toml(rope.rope_type)} does not read; "
               f"leave {'it' if len(idle) == 1 else 'them'} out, or use rope_type={toml(reads)}")


def _of_width(cfg: Model, key: str) -> Iterator[str]:
    rope, dims = cfg.rope_scaling, pattern.rope_width(cfg)
    if cfg.latent.kv_dim and rope.partial_rotary_factor != 1:
        yield (f"model.rope_scaling.partial_rotary_factor={rope.partial_rotary_factor} applies to whole heads, but "
               f"with latents model.latent.rope_dim={dims} is rotated; leave it out")
    elif cfg.head_dim and (dims % 2 or dims < 2):
        given, width_of = f"{key}={cfg.head_dim} (model.embed_dim={cfg.embed_dim}, model.num_heads={cfg.num_heads})", ""
        if cfg.latent.kv_dim:
            given = f"model.latent.rope_dim={dims}"
        elif dims != cfg.head_dim:
            given, width_of = f"{given} × partial_rotary_factor={rope.partial_rotary_factor}", "a rotated width of "
        yield (f'{given} is {"odd" if dims % 2 else "too small"}, and model.position="rope" rotates pairs; use e.g. '
               f'{width_of}{dims + dims % 2 or 2}, or "learned" positions')
    for name in ("short_factor", "long_factor"):
        factors = getattr(rope, name)
        if rope.rope_type == "longrope" and (len(factors) != dims // 2 or min(factors, default=1) <= 0):
            yield (f"model.rope_scaling.{name} has {len(factors)} numbers, but longrope divides {dims // 2} "
                   f"frequencies; give that many numbers, all above 0")
