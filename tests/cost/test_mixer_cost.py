"""What layers of several kinds cost by formulas: FLOPs, products and widths by kind, traffic over context, a price on
every layout."""
import dataclasses
import inspect
import itertools
import math
from collections import Counter

import pytest

from meshtrain import config, hardware, run_files
from meshtrain.cost.formulas import flops, footprint, mixers, price, rates, recurrences, traffic
from meshtrain.cost.formulas.assumptions import Assumptions
from meshtrain.cost.formulas.options import Attended, Options
from meshtrain.cost.formulas.place import place
from meshtrain.cost.formulas.sizes import RECURRENCE
from meshtrain.model import transformer
from meshtrain.names import LAYERS, LEADING
from meshtrain.sharding import rules
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.shipped import locate_shipped
from test_hybrids import MODELS

PRESETS = ("gpt-oss-20b", "qwen3.5-9b", "deepseek-v3", "glm-4.7-flash")
RATED = rates.Rates(hardware.get("h100"), Assumptions("h100"))
LAYOUTS = {"fsdp": ("zero3", dict(fsdp=8)), "tensor": ("ddp", dict(data=4, tensor=2)),
           "context": ("zero3", dict(fsdp=2, context=4)), "stage": ("zero1", dict(stage=2, fsdp=4))}


def section(name: str, **more) -> config.Model:
    if name in PRESETS:
        return run_files.load(["--model.preset", name, "--data.source", "tokens", "--data.paths", '["a.tokens.npy"]']
                           ).model.model_copy(update=dict(compute_dtype="bfloat16") | more)
    return config.Model(**MODELS[name] | dict(compute_dtype="bfloat16") | more)


def placed_of(name: str, rule: str = "zero3", mesh: dict | None = None, rank: int = 0, **more):
    cfg, spec = section(name, **more), MeshSpec(mesh or {})
    layout = rules.Layout(rules.load(locate_shipped(f"sharding_rules/{rule}.toml")), spec.sizes)
    model = transformer.build(cfg, config.Lora(rank=rank))
    layout = rules.Layout(model.fit(layout.rules, spec.sizes)[0], spec.sizes)
    return place(model.parameters(), cfg, layout, spec)


@pytest.mark.parametrize("letter, products", [("G", 3), ("K", 3), ("M", 2)])
def test_a_recurrence_counts_the_products_of_a_token_with_its_state(letter, products):
    """2·d·V each and value head, and twice as much backward, whatever the chunks."""
    linear = dict(key_heads=4, value_heads=4, key_dim=24, value_dim=40)
    cfg = config.Model(**MODELS["delta"] | dict(mixers=letter, linear=linear))
    table = transformer.build(cfg).parameters()
    matrices = sum(6 * flops.active(info, cfg) for info in table if info.role in ("matrix", "head", "router"))
    of = lambda length: flops.model_flops_per_token(table, cfg, length)
    assert of(64) == of(4096) == matrices + 3 * 5 * products * 2 * 4 * 24 * 40


def test_attention_counts_keys_and_values_by_their_widths_and_layers_by_their_kind():
    S = 4096
    assert mixers.flops(section("kda"), "N", S) == S * 4 * (14 + 10)   # latents' heads
    window = section("mamba")   # its window is 7 tokens
    seen = sum(min(t + 1, 7) for t in range(S)) / S
    assert mixers.flops(window, "W", S) == pytest.approx(2 * 4 * 2 * 12 * seen, rel=2e-3)
    wider = config.Model(**MODELS["mamba"] | dict(kinds=dict(W=dict(num_heads=8, head_dim=16))))
    assert mixers.flops(wider, "W", S) / mixers.flops(window, "W", S) == pytest.approx(8 * 16 / (4 * 12))


@pytest.mark.parametrize("name", [*MODELS, *PRESETS])
@pytest.mark.parametrize("mesh", [{}, dict(tensor=2)])
def test_products_of_all_kinds_by_their_shares_are_all_matrices(name, mesh):
    """Each element of a layer's matrices, on the device that multiplies it, once; biases of experts' outputs are
    weighted on tokens sharded as the residual stream."""
    placed = placed_of(name, "ddp", mesh)
    uses = lambda info: placed.layout.num_shards(
        {a for axis in info.axes for a in placed.layout.mesh_axes(rules.GATHERED, axis)})
    layers = [info for info in placed.rows if info.axes[0] in (LAYERS, LEADING)]
    held = sum(info.size / uses(info) for info in layers
               if info.role in ("matrix", "router") and "expert" not in info.axes)
    held += sum(info.size / placed.stream_shards for info in layers if info.path[-1] == "down_bias")
    found = sum(w.share * w.k * w.n for w in placed.layer.products) * placed.cfg.num_layers
    assert found == pytest.approx(held, rel=1e-12)


@pytest.mark.parametrize("cp, method, runs", [(4, "ring", 2), (2, "ulysses", 1)])
def test_a_recurrence_gathers_what_runs_do_to_its_states_whatever_their_length(cp, method, runs):
    """2·2cp·B·N·d(V + d)·4 bytes of a layer, forward and backward, in zigzag order."""
    placed = placed_of("qwen3.5-9b", "zero3", dict(context=cp))
    for length in (8192, 65536):
        options = Options(length, 2, 1, "selective", method=method)
        (gathered,) = [sent for sent in placed.mixers[1].exchanges(placed, options) if sent.kind == "all-gather"]
        assert gathered.array_bytes * gathered.runs == 24 * 2 * runs * cp * 2 * 32 * 128 * (128 + 128) * 4


@pytest.mark.parametrize("rule, sent", [("ddp", {"all-reduce": 4, "reduce-scatter": 2, "all-gather": 2}),
                                        ("tensor", {"all-reduce": 6})])
def test_adapters_add_arrays_of_their_rank_to_what_a_tensor_group_sends(rule, sent):
    """The cotangents between the matrices of q, k, v and up; what is between those of out and down, and with
    sequence parallelism its cotangent, and the float32 gradients of their outward matrices. No cotangent of the frozen
    embedding's rows is gathered."""
    added, options = Counter(), Options(512, 4, 2, "selective")
    for sign, rank in ((1, 3), (-1, 0)):
        placed = placed_of("mamba", rule, dict(tensor=2), rank=rank, mixers="F", mlps="d")
        for one in traffic.tensor(placed, options):
            added[one.kind, one.dtype] += sign * one.array_bytes * one.runs
    if rule == "ddp":
        assert added.pop(("all-reduce", "f32")) == 6 * 2 * 2 * 32 * 3 * 4
        added["all-gather", "bf16"] += 2 * 2 * 512 * 32 * 2
    array_bytes = 6 * 2 * (2 * 512 * 3 * 2)         # of 6 layers and 2 microbatches
    assert {kind: count for kind, count in added.items() if count} == {
        (kind, "bf16"): count * array_bytes for kind, count in sent.items()}


@pytest.mark.parametrize("name, wide", [("mamba", 0), ("kda", 2 * 8)])
def test_gradients_by_whole_matrices_beside_split_ones_are_of_shards(name, wide):
    """Kimi delta attention's two narrow projections, as wide as a value; with sequence parallelism alone."""
    for rule, shards in (("ddp", 2), ("tensor", 1)):
        placed = placed_of(name, rule, dict(tensor=2), mixers="F" if name == "mamba" else "K")
        skipped = sum(w.share * (w.n - placed.input_columns(w)) for w in placed.layer.products)
        assert skipped == wide * (1 - 1 / shards)


@pytest.mark.parametrize("method", ["ring", "gather", "ulysses"])
def test_latents_are_what_context_moves_with_any_method(method):
    """512 + 64 numbers of a token in place of 40,960."""
    placed, length = placed_of("deepseek-v3", "ddp", dict(context=4)), 16384
    found = list(traffic._context(placed, Options(length, 1, 1, "full", method=method)))
    gathered = [sent for sent in found if sent.kind == "all-gather"]
    assert sum(sent.array_bytes * sent.runs for sent in gathered) == 61 * 2 * length * 576 * 2
    assert {sent.kind for sent in found} == {"all-gather", "reduce-scatter"} | (
        {"all-to-all"} if method == "ulysses" else set())


@pytest.mark.parametrize("name", [*MODELS, *PRESETS])
@pytest.mark.parametrize("axis", LAYOUTS)
def test_every_layout_of_every_kind_has_a_price(name, axis):
    rule, mesh = LAYOUTS[axis]
    layers = dict(num_layers=12 if name == "mamba" else 9) if axis == "stage" and name in MODELS else {}
    placed, recurrent = placed_of(name, rule, mesh, **layers), set(section(name).mixers) & set("GKM")
    schedule = dict(schedule="1f1b") if axis == "stage" else {}
    for remat in ("none", "selective", "full"):
        options = Options(4096, 32, 4, remat, attended=Attended({"F": .5, "W": .1}, "pallas"), **schedule)
        found = price.price(placed, RATED, options)
        assert 0 < found.mfu < .7 and found.compute_s <= found.step_s
        assert bool(found.parts.get("recurrence")) == bool(recurrent)
        kernels = price.price(placed, RATED, dataclasses.replace(options, recurrence="pallas"))
        assert kernels.step_s < found.step_s if recurrent else kernels.step_s == found.step_s
        assert all(math.isfinite(n) and n > 0 for n in found.memory_bytes.values())
    widths = [footprint.residual_width(placed, Options(4096, 32, 4, remat)) for remat in ("none", "selective", "full")]
    assert widths == sorted(widths, reverse=True)


def test_a_recurrences_time_is_that_of_its_bytes_and_of_the_kernels_that_follow_each_other():
    mixer = next(mixer for mixer in placed_of("qwen3.5-9b").mixers if mixer.part == RECURRENCE)
    of = lambda tokens, length: mixer.scan_s(RATED, recurrences.Scan(tokens, length), 2, "xla")
    one, rows, longer = of(8192, 8192), of(16384, 8192), of(16384, 16384)
    for direction in (0, 1):
        launches_s = 9 * 64 * RATED.launch_s            # 64 more chunks one after the other
        assert longer[direction] - rows[direction] == pytest.approx(launches_s)
        assert rows[direction] < 2 * one[direction]


class Guarded(Options):
    """Options that raise where one is read that a footprint is not kept by."""

    def __getattribute__(self, name: str):
        assert name not in footprint.NOT_READ, name
        return super().__getattribute__(name)


@pytest.mark.parametrize("name", [*MODELS, *PRESETS])
@pytest.mark.parametrize("of", [pytest.param(of, marks=[pytest.mark.full] * (of != "stage")) for of in LAYOUTS])
def test_what_a_layout_keeps_of_its_footprint_depends_on_the_options_of_its_key_alone(name, of):
    """Each function is kept by all options but those that it never reads, so another value of any is computed anew."""
    rule, mesh = LAYOUTS[of]
    placed = placed_of(name, rule, mesh)
    kept = (footprint.slot_widths, footprint._beside_slots)
    others = [dict(remat=remat, microbatches=m, dispatch=to) for remat, m, to in itertools.product(
        ("none", "selective", "full"), (1, 4), ("auto", "gather"))] + [dict(recurrence="pallas"), dict(method="gather")]
    for function, other in itertools.product(kept, others):
        options = Options(4096, 32, **other)
        assert function(placed, options) == inspect.unwrap(function)(placed, Guarded(4096, 32, **other))
        plain = dataclasses.replace(options, schedule="1f1b", chunks=2, optimizer_bytes=4)
        assert function(placed, plain) is function(placed, options)
