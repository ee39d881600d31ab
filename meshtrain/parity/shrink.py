"""Makes a run small and keeps its features: kinds of layers, experts, windows, LoRA, objective, masks, optimizer.

The result depends only on the features, not on the run's sizes, so shrinking twice gives the same run as shrinking
once. Notes name whatever the small run computes differently from the run itself.
"""
from __future__ import annotations

import math
from typing import Any

from meshtrain import config, pattern
from meshtrain.config import Run
from meshtrain.names import AXES, PIPELINE_SCHEDULES
from meshtrain.training import objective

T, BATCH = 16, 16           # tokens of a sequence, sequences of a step
EMBED, HEAD, MLP, EXPERT_MLP, VOCAB = 32, 8, 48, 16, 259     # 259 is padded to 512: some rows of the head are unused
MOST_EXPERTS, MOST_CHOSEN = 8, 3
LAYERS_OF_PERIODS = 8       # enough for two chunks on four stages if a period is one layer


def shrunk(run: Run, num_devices: int) -> tuple[Run, list[str]]:
    """Return (the run made small, on a mesh of at most `num_devices`; notes about what it computes differently)."""
    training, optimizer, lora, rl = run.training, run.optimizer, run.lora, run.rl
    goal = objective.of_run(run)
    decays = {"decay_steps": 3} if optimizer.schedule == "wsd" else {"decay_steps": 0}
    mesh = _mesh(run, num_devices)
    by_muon = optimizer.name == "muon" or any(row.rule == "muon" for row in optimizer.groups.rows.values())
    clips = min(optimizer.qk_clip, 1.0)     # small weights give small scores, some of which exceed 1
    sections = dict(
        run=config.Identity(name=run.run.name, seed=run.run.seed),
        mesh=mesh, sharding=run.sharding, model=_model(run),
        data=config.Data(seq_len=T, global_batch=BATCH, document_mask=run.data.document_mask, **(
            {"source": run.data.source, "paths": run.data.paths} if goal.data in ("pairs", "answers") else {})),
        training=config.Training(
            steps=9, microbatches=_microbatches(run, mesh), remat=training.remat, grad_clip=training.grad_clip,
            objective=training.objective, dpo_beta=training.dpo_beta, z_loss=training.z_loss, loss_chunk=24,
            mtp_weight=training.mtp_weight),
        optimizer=optimizer.model_copy(update=dict(
            learning_rate=1e-3, warmup_steps=min(optimizer.warmup_steps, 2), qk_clip=clips, moments_dtype="float32",
            groups=config.WeightGroups(), name="muon" if by_muon else optimizer.name, **decays)),
        lora=lora.model_copy(update=dict(rank=2, alpha=2 * lora.alpha / lora.rank, init_from=""))
        if lora.rank else config.Lora(),
        pipeline=run.pipeline.model_copy(update=dict(chunks=min(run.pipeline.chunks, 2))),
        context=run.context, experts=run.experts.model_copy(update=dict(bias_warmup=0)),
        distill=run.distill.model_copy(update=dict(
            top_tokens=min(run.distill.top_tokens, 8))) if goal.data == "taught" else run.distill,
        rl=rl.model_copy(update=dict(prompts=4 * rl.updates, samples=2, max_tokens=T // 2, reward="exact",
                                     rules="")) if goal.samples else rl,
        checkpoint=config.Checkpoint(init_from="runs/start" if rl.kl else ""),
    )  # fmt: skip
    return Run(**sections), _list_changes(run, sections["optimizer"])


def _list_changes(run: Run, optimizer: config.Optimizer) -> list[str]:
    model, told = run.model, []
    if "bfloat16" in (model.compute_dtype, model.param_dtype, run.optimizer.moments_dtype):
        told.append("computed in float32, so the rounding of bfloat16 is not compared")
    if run.optimizer.groups != optimizer.groups:
        told.append("optimizer.groups is left out: no layout changes the rate and decay of a weight")
    if model.matmul_dtype == "float8":
        told.append("float8 matmuls are computed in float32, so the rounding of float8 is not compared")
    if model.attention != "auto":
        told.append(f"attention is computed by XLA: the engine model.attention={model.attention!r} runs only on GPUs")
    if model.mlp == "mosaic":
        told.append("MLPs are computed by XLA: the kernels of model.mlp='mosaic' run only on GPUs")
    if optimizer.learning_rate != run.optimizer.learning_rate or optimizer.warmup_steps != run.optimizer.warmup_steps:
        told.append(f"optimizer.learning_rate={optimizer.learning_rate:g}, optimizer.warmup_steps="
                    f"{optimizer.warmup_steps}: the weights have to change within three steps")
    if optimizer.qk_clip != run.optimizer.qk_clip:
        told.append(f"optimizer.qk_clip={optimizer.qk_clip:g}: scores of a small model would not reach "
                    f"{run.optimizer.qk_clip:g}")
    if _irregular(model):
        told.append("model.mixers and model.mlps have no period: one layer of each kind is repeated instead")
    if _norm_eps(model) != model.norm_eps:
        told.append(f"model.norm_eps={_norm_eps(model):g}: with a smaller value, norms would amplify the rounding of "
                    f"the small outputs of the first layers")
    return told


# ---- the layout ------------------------------------------------------------------------------------------------------


def _mesh(run: Run, num_devices: int) -> config.Mesh:
    """Return the run's mesh, with its largest axis halved until the mesh fits on the devices. An axis of -1 gets half
    of the devices, so that the batch can still be divided into microbatches."""
    sizes = {axis: getattr(run.mesh, axis) for axis in AXES}
    sizes = {axis: max(2, num_devices // 2) if size == -1 else size for axis, size in sizes.items()}
    while math.prod(sizes.values()) > num_devices:
        longest = max((axis for axis in AXES), key=sizes.__getitem__)
        sizes[longest] = 1 << (sizes[longest] - 1).bit_length() - 1      # the next lower power of two
    return config.Mesh(**sizes, placement=run.mesh.placement)


def _microbatches(run: Run, mesh: config.Mesh) -> int:
    """Return the run's number of microbatches, or for an interleaved schedule at least the number of stages; reduced to
    1, 2 or 4 and to what the batch allows."""
    chunked = mesh.stage > 1 and PIPELINE_SCHEDULES.get(run.pipeline.schedule, PIPELINE_SCHEDULES["gpipe"]).chunked
    most = max(run.training.microbatches, mesh.stage * chunked)
    return max(n for n in (1, 2, 4) if n == 1 or n <= most and BATCH % (n * mesh.data * mesh.fsdp) == 0)


# ---- the model -------------------------------------------------------------------------------------------------------


def _model(run: Run) -> config.Model:
    model = run.model
    layers, patterns = _layers(model)
    keys: dict[str, Any] = dict(vocab_size=VOCAB, embed_dim=EMBED, mlp_dim=MLP, norm_eps=_norm_eps(model),
                                num_layers=layers)
    keys |= patterns
    keys |= _heads(model.num_heads, model.num_kv_heads) | {"head_dim": HEAD}
    keys |= dict(attention="auto", mlp="auto", param_dtype="float32", compute_dtype="float32", matmul_dtype="auto",
                 preset="", embedding_std=0.02, max_seq_len=0)
    if model.num_experts:
        keys |= _experts(model)
    latent, linear = model.latent, model.linear
    if latent.kv_dim:
        keys["num_kv_heads"] = keys["num_heads"] = 4
        keys["latent"] = latent.model_copy(update=dict(
            kv_dim=16, query_dim=min(latent.query_dim, 12), rope_dim=4, value_dim=min(latent.value_dim, 6)))
    if linear.key_heads:
        ratio = min(2, linear.value_heads // max(1, linear.key_heads))
        keys["linear"] = linear.model_copy(update=dict(
            key_heads=4 if ratio == 1 else 2, value_heads=4, key_dim=HEAD, value_dim=HEAD,
            conv_width=min(linear.conv_width, 4)))
    windows = sorted({window for window in (model.window, *(kind.window for _, kind in model.kinds)) if window})
    # Window -> a small one that is longer than a device's part of a sequence and no multiple of it.
    small = {window: 6 - 3 * i if i < 2 else 4 for i, window in enumerate(reversed(windows))} | {0: 0, None: None}
    keys["window"] = small[model.window]
    keys["rope_scaling"] = _rope(model.rope_scaling, run.data.seq_len, keys.get("latent", latent), HEAD)
    keys["kinds"] = model.kinds.model_copy(update={
        mixer: _kind(run, kind, small, keys.get("latent", latent)) for mixer, kind in model.kinds})
    return model.model_copy(update=keys)


def _norm_eps(model: config.Model) -> float:
    placed = {model.norm_placement, *(kind.norm_placement or "before" for _, kind in model.kinds)}
    return model.norm_eps if placed == {"before"} else max(model.norm_eps, 0.01)


def _irregular(model: config.Model) -> bool:
    return pattern.period(model) == 0 and len(set(pattern.kinds(model))) > 1


def _layers(model: config.Model) -> tuple[int, dict[str, str]]:
    """Return (number of layers, the keys mixers and mlps if they change)."""
    if _irregular(model):
        distinct = list(dict.fromkeys(pattern.kinds(model)))
        return 4 * len(distinct), {"mixers": "".join(kind.mixer for kind in distinct),
                                   "mlps": "".join(kind.mlp for kind in distinct)}
    parts, length = pattern.stretches(model), pattern.period(model)
    ends = sum(part.num_layers for part in parts if part.leading or part.name == "left")
    repeats = LAYERS_OF_PERIODS // length if length < 3 else 4 if length < 5 else 2
    return ends + repeats * length, {}


def _heads(heads: int, kv_heads: int) -> dict[str, int]:
    """Return small numbers of heads with the run's ratio of query heads to key heads, at most 4; with several key heads
    if the run has several."""
    ratio = next((n for n in (4, 2, 3) if heads // max(1, kv_heads) % n == 0), 1)
    kv = 1 if kv_heads == 1 < heads else 4 if ratio == 1 else 2
    return {"num_heads": kv * ratio, "num_kv_heads": kv}


def _experts(model: config.Model) -> dict:
    groups, limit = (*model.router_groups, 0, 0)[:2]
    E = MOST_EXPERTS if model.num_experts >= MOST_EXPERTS or groups else model.num_experts
    K = max(1, min(model.experts_per_token, MOST_CHOSEN, E if model.experts_per_token == model.num_experts else E - 1))
    small = {} if not groups else {"router_groups": (4, max(2, min(limit, 3))) if groups > 2 else (2, limit)}
    return dict(num_experts=E, experts_per_token=K, expert_mlp_dim=EXPERT_MLP,
                shared_expert_dim=min(model.shared_expert_dim, EXPERT_MLP), **small)


def _kind(run: Run, kind, windows: dict, latent) -> object:
    model, update = run.model, {"window": windows[kind.window]}
    if kind.num_heads or kind.num_kv_heads:
        heads = _heads(kind.num_heads or model.num_heads, kind.num_kv_heads or model.num_kv_heads)
        update |= {name: heads[name] for name in heads if getattr(kind, name)}
        if not kind.num_heads:      # the model's query heads, with one or two key heads
            update["num_kv_heads"] = 1 if kind.num_kv_heads == 1 else 2
    if kind.head_dim:
        update["head_dim"] = HEAD if kind.head_dim == model.head_dim else 2 * HEAD
    if kind.rope_scaling:
        update["rope_scaling"] = _rope(kind.rope_scaling, run.data.seq_len, latent, update.get("head_dim") or HEAD)
    return kind.model_copy(update=update)


def _rope(rope, seq_len: int, latent, head_dim: int):
    """Return the rope scaling for a small head. The small sequence exceeds the original length if the run's does."""
    beyond = rope.rope_type != "longrope" or seq_len > rope.original_max_position_embeddings
    partial = rope.partial_rotary_factor if rope.partial_rotary_factor * head_dim >= 2 else 0.5
    if rope.rope_type != "proportional":
        partial = max(2, int(head_dim * partial) // 2 * 2) / head_dim if partial != 1 else 1.0
    width = latent.rope_dim if latent.kv_dim else int(head_dim * partial)
    read = dict(rope)
    update = {"partial_rotary_factor": partial} if not latent.kv_dim else {}
    if "original_max_position_embeddings" in read:
        update["original_max_position_embeddings"] = T // 2 if beyond else 2 * T
    for name in ("short_factor", "long_factor"):
        if name in read:
            update[name] = getattr(rope, name)[:width // 2]
    return rope.model_copy(update=update)
