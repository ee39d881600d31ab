"""Translates settings of earlier versions, so that their run files and checkpoints still load.

Each translation is exact. A setting without an equivalent is left in a run file and refused as an unknown key.
"""
from __future__ import annotations

from collections.abc import Mapping

from meshtrain.config.sections import RopeScaling

# Removed keys, with the only value that a run file may still give them; a checkpoint may have any value.
GONE = {"model": {"attention_dropout": 0.0}, "data": {"validation_tokens": 0, "prefetch": 4},
        "pipeline": {"uneven": "pad"},
        "experts": {"upcycle_noise": 0.0}}
TIMEOUTS = ("compile_timeout_s", "restore_timeout_s", "save_timeout_s")


def translated(tables: Mapping, saved: bool = False) -> dict:
    """Return Section -> key -> value in this version's keys.

    saved: the tables are those of a checkpoint, and removed keys are dropped whatever their value.
    """
    made = {name: dict(table) if isinstance(table, dict) else table for name, table in tables.items()}
    for name, keys in GONE.items():
        for key, value in keys.items() if isinstance(made.get(name), dict) else ():
            if saved or made[name].get(key) == value:
                made[name].pop(key, None)
    for name, change in (("model", _model), ("training", _training), ("metrics", _metrics)):
        if isinstance(made.get(name), dict):
            change(made[name])
    return made


def _model(table: dict) -> None:
    if type(table.get("qk_norm")) is bool:
        over = table.pop("qk_norm_over", "head")
        table["qk_norm"] = {"head": "head", "heads": "all_heads"}.get(over, over) if table["qk_norm"] else "off"
    if type(table.get("attention_bias")) is bool:
        out = table.get("attention_out_bias") is True or table["attention_bias"] and table.get("norm") == "layernorm"
        if table["attention_bias"] or not out:
            table.pop("attention_out_bias", None)
            table["attention_bias"] = ("all" if out else "qkv") if table["attention_bias"] else "none"
    if type(table.get("router_bias")) is bool:
        table["router_bias"] = "choice" if table["router_bias"] else "none"
    _layers(table)
    if type(table.get("router_groups")) is int:
        groups, limit = table["router_groups"], table.pop("router_group_limit", 0)
        table["router_groups"] = [groups, limit or groups] if groups else []
    if any(key == "rope_scaling" and isinstance(table[key], str) or key.startswith("rope_scaling_") for key in table):
        kind, factor = table.pop("rope_scaling", "llama3"), table.pop("rope_scaling_factor", 1.0)
        words = {"low_freq_factor": "low_freq_factor",
                 "high_freq_factor": "high_freq_factor"} if kind == "llama3" else \
            {"low_freq_factor": "beta_slow", "high_freq_factor": "beta_fast"}
        given = {new: table.pop(f"rope_{old}") for old, new in words.items() if f"rope_{old}" in table}
        if "rope_original_seq_len" in table:
            given["original_max_position_embeddings"] = table.pop("rope_original_seq_len")
        scaling = {"rope_type": kind, "factor": factor} | (given if kind != "linear" else {})
        table["rope_scaling"] = dict(RopeScaling(**scaling if factor != 1.0 else {}))


def _layers(table: dict) -> None:
    """Translate the keys that `mixers`, `mlps`, `kinds` and `multipliers` replace."""
    every, dense = table.get("global_every"), table.get("first_dense_layers")
    if type(every) is int and every >= 0:
        del table["global_every"]
        if every == 1:
            table.pop("window", None)       # no layer had a window
        if every > 1:
            table["mixers"] = "W" * (every - 1) + "F"
    if type(dense) is int and dense >= 0:
        del table["first_dense_layers"]
        if dense:
            table["mlps"] = "d" * dense + "e*"
    theta = table.get("local_rope_theta")
    if type(theta) in (int, float) and theta >= 0:
        del table["local_rope_theta"]
        if theta and every:
            table["kinds"] = {"W": {"rope_theta": theta, "rope_scaling": {"rope_type": "default"}}}
    factors = {}
    if type(table.get("scale_embedding")) is bool and (
            not table["scale_embedding"] or type(table.get("embed_dim")) is int):
        factors |= {"embedding": table["embed_dim"] ** 0.5} if table.pop("scale_embedding") else {}
    if type(table.get("attention_scale_dim")) is int and table["attention_scale_dim"] >= 0:
        dim = table.pop("attention_scale_dim")
        factors |= {"score": dim ** -0.5} if dim else {}
    if factors:
        table["multipliers"] = factors


def _training(table: dict) -> None:
    if table.get("loss_spike") == "tell":
        table["loss_spike"] = "warn"
    limits = {table[key] for key in TIMEOUTS if key in table}
    if len(limits) == 1:
        for key in TIMEOUTS:
            table.pop(key, None)
        table["phase_timeout_s"] = limits.pop()


def _metrics(table: dict) -> None:
    if table.get("wandb") in ("off", "online"):
        project = table.pop("wandb_project", "meshtrain")
        table["wandb"] = project if table["wandb"] == "online" else ""
