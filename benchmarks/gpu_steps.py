"""Compare one training step of every rule file and schedule that the devices allow with one CPU device, and two runs
bit by bit.
"""
from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import jax
import numpy as np

from benchmarks.gpu_attention import has_mosaic
from benchmarks.gpu_record import ROOT, Item
from meshtrain import assembly, config
from meshtrain import hardware
from meshtrain.training.state import State

RULES = ROOT / "sharding_rules"
# (loss, gradients). float32 runs at the highest precision, so that only the order of sums differs; the error is a share
# of a gradient's largest number. bfloat16: the error is a share of a gradient's norm; activations and weights are
# rounded to 8 bits (2^-9 of each number) in some 60 operations from end to end. Float8 is compared with float8 on the
# CPU, also by a gradient's norm. If sums have another order, some numbers round to a neighbouring value, 6 or 12% away.
# Each further rounding turns a difference d into about the root of .06 d, so that after five or six roundings all
# numbers are rounded differently: a CPU differs from itself by .20 if its weights change by 1e-7, an H200 by .22, and
# by .30 in bfloat16. So this check finds only wrong scales, which are wrong by a power of two. `gpu_kernels` compares
# the products themselves. Experts in bfloat16: a router sees rounded tokens and chooses other experts for some of them.
# Because of this, and of recurrences, a CPU's bfloat16 differs from its float32 by up to .15 here.
FLOAT8, ROUGH = "float8 in ", "experts or recurrences in "
TOLERANCE = {"float32": (1e-5, 1e-4), "bfloat16": (2e-3, 5e-2), ROUGH + "bfloat16": (5e-3, .3),
             FLOAT8 + "float32": (1e-3, .4), FLOAT8 + "bfloat16": (1e-2, .4)}
# A true gradient may be zero or nearly so. An error is divided by at least this fraction of the norm of all gradients.
FLOOR = {"float32": 1e-3} | dict.fromkeys(("bfloat16", ROUGH + "bfloat16", FLOAT8 + "float32", FLOAT8 + "bfloat16"), 1e-2)
# (rule file, axes beside fsdp). Those that most runs use come first.
LAYOUTS = (("zero3",), ("ddp",), ("zero1",), ("zero3", "stage", "tensor", "context"),
           ("zero3", "tensor"), ("zero3", "context"),
           ("zero1", "stage"), ("zero2",), ("hsdp", "data"), ("hsdp_zero1", "data"),
           ("tensor", "tensor"), ("ddp", "tensor"),
           ("ddp", "context"), ("ddp", "stage"), ("zero1", "context"), ("zero1", "stage", "tensor"),
           ("zero2", "stage", "tensor"),
           ("zero3", "stage", "tensor"), ("zero3_experts_fsdp",), ("zero3_experts_tensor", "tensor"))
# Kinds of layers, with widths that the GPU's kernels support.
LAYERS = {
    "mosaic, head_dim 128": dict(attention="mosaic", head_dim=128),
    "head_dim 256, norms of heads": dict(head_dim=256, qk_norm="head"),
    "windows, softcap, four norms": dict(mixers="WF", window=48, score_softcap=50.0, logit_softcap=30.0,
                                         norm_placement="both", activation="geglu"),
    "MLP by mosaic": dict(attention="mosaic", mlp="mosaic"),
    # so wide that XLA does not combine both matmuls on one device
    "residuals written in place": dict(mlp_dim=16384, num_layers=3),
    "windows, softcap, mosaic": dict(mixers="WF", window=48, score_softcap=50.0, attention="mosaic"),
    "experts, norms of heads": dict(num_experts=8, expert_mlp_dim=256, embedding_std=1.0, qk_norm="head"),
    "experts, sinks, biases": dict(mixers="WF", window=48, activation="swiglu_clamped", attention_bias="all",
                                   attention_sinks=True, mlp_bias=True, num_experts=8, experts_per_token=4,
                                   expert_mlp_dim=256, router_bias="logits", embedding_std=1.0),
    "latents, shared expert": dict(num_kv_heads=4, head_dim=192, mlps="de*", num_experts=8, expert_mlp_dim=256,
                                   shared_expert_dim=256, router_score="sigmoid", embedding_std=1.0,
                                   latent=dict(kv_dim=128, query_dim=128, rope_dim=64, value_dim=128)),
    "gated delta rule": dict(mixers="GGGF", attention_gate=True, linear=dict(key_heads=2, value_heads=4)),
    "Kimi delta attention": dict(mixers="KKKF", linear=dict(key_heads=2, value_heads=2)),
    "Mamba-2": dict(mixers="MMMF", linear=dict(key_heads=1, value_heads=8, value_dim=64)),
}
SCHEDULES = {"1f1b": 1, "interleaved_zero_bubble": 2, "zero_bubble": 1, "gpipe": 1, "interleaved": 2}     # chunks


class Sizes(NamedTuple):
    """kernels: whether heads are wide enough for the GPU's attention kernels, which bfloat16 uses."""
    model: tuple = (("vocab_size", 512), ("embed_dim", 256), ("num_layers", 8), ("num_heads", 4), ("num_kv_heads", 2),
                    ("head_dim", 64), ("mlp_dim", 512))
    seq_len: int = 256
    sequences: int = 32
    microbatches: int = 4
    dtypes: tuple[str, ...] = ("bfloat16", "float32")


def mesh_for(axes: Sequence[str], count: int) -> dict[str, int]:
    """Return a mesh with two devices on each of these axes, as far as the devices suffice, and the rest on fsdp."""
    sizes, left = {}, count
    for axis in axes:
        if left % 2 == 0:
            sizes[axis], left = 2, left // 2
    return {**sizes, "fsdp": left}


def run_of(rule: str, mesh: dict, dtype: str, sizes: Sizes, **more) -> config.Run:
    return config.Run(
        mesh=mesh, sharding=dict(rules=str(RULES / f"{rule}.toml")),
        model=dict(sizes.model) | dict(compute_dtype=dtype) | more.get("model", {}),
        data=dict(seq_len=sizes.seq_len, global_batch=sizes.sequences) | more.get("data", {}),
        training=dict(steps=20, microbatches=sizes.microbatches, grad_clip=0.0,
                      loss_chunk=512) | more.get("training", {}),
        pipeline=more.get("pipeline", {}), context=more.get("context", {}),
        optimizer=dict(learning_rate=1e-3, warmup_steps=2))


@functools.cache
def rows(step: int, sequences: int, length: int, vocab: int, mean: float) -> dict:
    """Return packed documents of geometric lengths. The end of a document has no target, and a quarter of the sequences
    has hardly any targets."""
    rng, shape = np.random.default_rng(step), (sequences, length)
    tokens, targets = rng.integers(0, vocab, (2, *shape))
    index = np.tile(np.arange(length), (sequences, 1))
    starts = rng.random(shape) < 1 / mean
    starts[:, 0] = True
    targets[:, :-1][starts[:, 1:]] = -1
    few = targets[: sequences // 4]
    targets[: sequences // 4] = np.where(rng.random(few.shape) < .9, -1, few)
    out = {"tokens": tokens, "targets": targets, "index": index, "sequence": step * sequences + np.arange(sequences),
           "segments": np.cumsum(starts, 1), "positions": index - np.maximum.accumulate(np.where(starts, index, 0), 1)}
    return {name: x.astype(np.int32) for name, x in out.items()}


def batch(step: int, run: config.Run) -> dict:
    mean = run.data.seq_len / 5 if run.data.document_mask else 1e9
    return rows(step, run.data.global_batch, run.data.seq_len, run.model.vocab_size, mean)


def first_moment(opt_state):
    return next(s.mu for s in jax.tree.leaves(opt_state, is_leaf=lambda s: hasattr(s, "mu")) if hasattr(s, "mu"))


_compiled: dict[str, object] = {}


def compiled(made: assembly.Assembly):
    """Return (the compiled step, whether another run of this process had the same program). On one device all rule
    files have the same program."""
    program = made.program
    # compute float32 exactly; bfloat16 programs are those of a run
    exact = made.run.model.compute_dtype == "float32"
    with jax.default_matmul_precision("highest") if exact else contextlib.nullcontext():
        with jax.set_mesh(made.mesh):
            text = program.train.lower(program.step.state.abstract, program.step.batch).as_text()
        key = hashlib.sha256(f"{made.mesh.devices} {text}".encode()).hexdigest()
        known = key in _compiled
        if not known:
            _compiled[key] = assembly.compile_step(made, made.program.lower_step())
    return _compiled[key], known


def train(made: assembly.Assembly, step, params) -> tuple[list[float], dict]:
    """Return the losses of two steps from these host params, and the gradients of the first step: adamw's first moment
    divided by 1 - b1."""
    program = made.program
    # adamw starts from zeros
    opt_state = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), program.step.state.abstract.opt_state)
    state, losses, grads = jax.device_put(State(np.int32(0), params, opt_state), program.step.state.sharding), [], None
    for number in range(2):
        state, metrics = step(state, program.place(batch(number, made.run)))
        losses.append(float(metrics["loss"]))
        share = np.float32(1 - made.run.optimizer.b1)
        grads = grads or jax.tree.map(lambda m: m / share, jax.device_get(first_moment(state.opt_state)))
    return losses, grads


def reference(sizes: Sizes, cpu, packed: bool = True, model: Mapping = MappingProxyType({})):
    """Return (params, losses, gradients) of one CPU device in float32. It uses the same number of microbatches if
    float8 scales each separately. model: keys beside sizes.model."""
    return _reference(sizes, cpu, packed, json.dumps({**model, "attention": "auto"}, sort_keys=True))


@functools.cache
def _reference(sizes: Sizes, cpu, packed: bool, model: str):
    model = json.loads(model)
    microbatches = 1 if model.get("matmul_dtype", "auto") == "auto" else sizes.microbatches
    run = run_of("ddp", {}, "float32", sizes._replace(microbatches=microbatches), data=dict(document_mask=packed),
                 model=model)
    one = assembly.assemble(run, [cpu])
    with jax.default_device(cpu):
        params = jax.device_get(one.model.init(jax.random.key(0)))
        return params, *train(one, compiled(one)[0], params)


def norm(x) -> float:
    return float(np.sqrt(np.sum(np.square(x, dtype=np.float64))))


def compare(losses, grads, expected_losses, expected, dtype: str) -> dict[str, tuple[float, float]]:
    """Return Item's `compared`: the losses of both steps and every gradient leaf."""
    loss_tolerance, tolerance = TOLERANCE[dtype]
    pairs = enumerate(zip(losses, expected_losses), 1)
    out = {f"loss of step {n}": (abs(a - b) / abs(b), n * loss_tolerance) for n, (a, b) in pairs}
    total = math.sqrt(sum(norm(e) ** 2 for e in jax.tree.leaves(expected)))
    size = (lambda x: float(np.abs(x).max())) if dtype == "float32" else norm
    for (path, g), e in zip(jax.tree.leaves_with_path(grads), jax.tree.leaves(expected), strict=True):
        name = "gradient of " + "/".join(str(getattr(key, "key", key)) for key in path)
        out[name] = size(g - e) / max(size(e), FLOOR[dtype] * total), tolerance
    return out


def check(run: config.Run, devices, cpu, sizes: Sizes, model: Mapping = MappingProxyType({})) -> dict:
    """Return what Item.measure returns for a run on these devices. model: its keys beside sizes.model."""
    made = assembly.assemble(run, devices)
    dtype, in_float8 = run.model.compute_dtype, run.model.matmul_dtype == "float8"
    params, losses, grads = reference(sizes, cpu, run.data.document_mask, model)
    step, known = compiled(made)
    said = ", ".join([str(made.mesh_spec), *(["a program that was compared before"] if known else []),
                      *(note for note in made.notes if note.startswith(("attention", "pipeline")))])
    rough = dtype == "bfloat16" and (run.model.num_experts or run.model.linear.key_heads)
    kind = FLOAT8 + dtype if in_float8 else ROUGH + dtype if rough else dtype
    return {"compared": compare(*train(made, step, params), losses, grads, kind), "said": said[:200]}


def same_bits(run: config.Run, devices) -> dict:
    """Run two steps twice, the second time with a newly compiled program. Return how many bytes of the state and the
    metrics differ."""
    made, bits = assembly.assemble(run, devices), []
    for _ in range(2):
        step, state = assembly.compile_step(made, made.program.lower_step()), assembly.initialize(made)
        for number in range(2):
            state, metrics = step(state, made.program.place(batch(number, run)))
        bits.append(jax.device_get((state, metrics)))

    def octets(x) -> np.ndarray:
        return np.frombuffer(np.asarray(x).tobytes(), np.uint8)
    differ = {jax.tree_util.keystr(path): (float((octets(a) != octets(b)).sum()), 0.0)
              for (path, a), (_, b) in zip(*map(jax.tree.leaves_with_path, bits))}
    digest = hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(bits[0]))).hexdigest()[:16]
    return {"compared": differ, "said": f"bits {digest}"}


def items(devices, cpu, sizes: Sizes = Sizes()) -> list[Item]:
    """Return the items, the most useful first, in the dtype of a run."""
    devices = devices[: 2 ** int(math.log2(len(devices)))]
    count, out, gpu = len(devices), [], hardware.from_device_kind(devices[0].device_kind)

    def add(group: str, what: str, rule: str, mesh: dict, dtype: str, **more):
        run = run_of(rule, mesh, dtype, sizes, **more)
        measure = partial(check, run, devices, cpu, sizes, more.get("model", {}))
        out.append(Item(f"{group}/{what}, {dtype}", measure, 20))

    for dtype in sizes.dtypes:
        for rule, *axes in LAYOUTS if count > 1 else LAYOUTS[:1]:       # all have one program on one device
            add("layout", " ".join([rule, *axes]), rule, mesh_for(axes, count), dtype)
        for remat in ("selective", "full", "offload"):
            add("layout", f"zero3, remat {remat}", "zero3", mesh_for((), count), dtype, training=dict(remat=remat))
        # cuDNN's kernels
        for rule, *axes in (("zero3",), ("zero3", "context"), ("zero1", "stage"))[:3 if count > 1 else 1]:
            add("layout", " ".join([rule, *axes]) + ", whole rows", rule, mesh_for(axes, count),
                dtype, data=dict(document_mask=False))
        if devices[0].platform == "cpu" or not hardware.lacks_float8(gpu):
            add("layout", "zero3, float8", "zero3", mesh_for((), count), dtype, model=dict(matmul_dtype="float8"))
        for name, model in LAYERS.items():
            if model.get("attention") != "mosaic" or dtype == "bfloat16" and has_mosaic(gpu):
                add("layers", name, "zero3_experts_fsdp", mesh_for((), count), dtype, model=model)
        for method in ("gather", "ulysses") if count > 1 else ():
            add("layout", f"zero3 context, {method}", "zero3", mesh_for(("context",), count),
                dtype, context=dict(method=method))
        for schedule, chunks in SCHEDULES.items() if count > 1 else ():
            stages = min(4, count)
            add("schedule", schedule, "zero1", dict(stage=stages, fsdp=count // stages), dtype,
                pipeline=dict(schedule=schedule, chunks=chunks))
    bits = run_of("zero3", dict(fsdp=count), "bfloat16", sizes, training=dict(deterministic=True))
    return [*out, Item("deterministic/zero3, bfloat16", partial(same_bits, bits, devices), 40)]

