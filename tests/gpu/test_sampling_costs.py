"""What sampling costs: formulas by hand, as compiled for GPUs and simulated devices, and as `inspect` shows them."""
import collections
import functools
import json
import math

import jax
import pytest
from commands import call, home, in_a_directory_of_its_own  # noqa: F401
from jax.sharding import PartitionSpec as P
from test_weight_sync import BY_FSDP, EXPERTS, MODEL, assembled

from meshtrain import config, design, hardware, run_files
from meshtrain.commands import inspect, plan
from meshtrain.cost.formulas import decode, traffic
from meshtrain.cost.formulas.assumptions import Assumptions
from meshtrain.cost.formulas.place import place
from meshtrain.cost.formulas.rates import Rates
from meshtrain.cost.program import audit, compile
from meshtrain.inference import cache, passes, placement
from meshtrain.inference.generate import LONGEST_STRIDE
from meshtrain.rl import samplers
from meshtrain.rl import sync as inference
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.sharding.moves import moves
from meshtrain.shipped import locate_shipped

needs_gpu_compiler = pytest.mark.skipif(compile.missing_wheels(),
                                        reason=f"install the extra gpu-compile: no {compile.missing_wheels()}")
FULL = Rates(hardware.get("h100"), Assumptions("h100", {
    "hbm.share": 1.0, "link.share": 1.0, "nic.share": 1.0, "matmul.best": 1.0, "matmul.sustained": 1.0}))


def priced(preset: str, slots: int, room: int, **mesh) -> decode.Sampling:
    """Stored by ZeRO-3, on H100s."""
    run, _ = run_files.resolve({"model": {"preset": preset}}, [], ("model.",), "")
    run = run.replace(mesh=mesh, data=dict(global_batch=64, seq_len=room),
                       sharding=dict(rules=str(locate_shipped("sharding_rules/zero3.toml"))))
    made = design.make(run, MeshSpec(mesh), "gpu", hardware.get("h100"))
    read = placement.beside(made.model, made.layout)
    placed = place(made.model.parameters(), run.model, read, made.mesh_spec)
    return decode.Sampling(placed, made.layout, slots, room, functools.partial(cache.places, room=room))


def sent(costs: decode.Sampling) -> dict:
    return {(row["kind"], *row["axes"], row["dtype"]): row["bytes"]
            for row in traffic.summarize(costs.sync(), costs.placed.mesh.sizes)}


# ---- by hand ---------------------------------------------------------------------------------------------------------


def test_8b_on_8_h100_by_hand():
    costs = priced("llama3-8b", 512, 2048, fsdp=8)
    moved = sent(costs)["all-gather", "fsdp", "bf16"]
    assert moved == pytest.approx(16.06e9 * 7 / 8, rel=1e-3)                # whole on each GPU, of which it had 1/8
    assert costs.sync_s(FULL) == pytest.approx(31.2e-3, rel=.02)            # at 450 GB/s
    assert costs.copy_bytes() == pytest.approx(16.06e9, rel=1e-3)
    assert costs.slot_bytes == 2048 * 32 * 2 * 8 * 128 * 2                  # 128 KiB a token
    assert costs.fitting(2.5 * costs.slot_bytes) == 16 and costs.fitting(-1.0) == 0


@pytest.mark.parametrize(("preset", "tensor", "rows", "weights", "table", "token_kib"), [
    ("llama3-8b", 1, 64, 16.06e9, 1.05e9, 128), ("llama3-8b", 1, 256, 16.06e9, 1.05e9, 128),
    ("llama3-70b", 8, 64, 17.64e9, 0.263e9, 40), ("llama3-70b", 8, 256, 17.64e9, 0.263e9, 40),
    ("llama3.2-1b", 1, 64, 2.47e9, 0.0, 32)])     # the table is the head
def test_a_token_of_full_slots_by_hand(preset, tensor, rows, weights, table, token_kib):
    """Bytes of a GPU: all weights but the table of embeddings, of which few rows are read, and the keys and values of
    2,048 tokens of each slot, at 3.35 TB/s."""
    costs = priced(preset, rows, 2048, **({"tensor": tensor} if tensor > 1 else {}))
    seconds, by_hand = costs.token_s(FULL, 2048), (weights - table + rows * 2048 * token_kib * 1024) / 3.35e12
    assert seconds["HBM"] == pytest.approx(by_hand, rel=.01)
    assert sum(map(costs.read_bytes, costs.placed.rows)) == pytest.approx(weights, rel=2e-3)
    reduced = [one for one in costs.token() if one.axes == ("tensor",) and one.dtype == "bf16"]
    assert sum(one.runs for one in reduced) == (2 * costs.placed.cfg.num_layers + 1 if tensor > 1 else 0)
    assert {one.array_bytes for one in reduced} <= {rows * costs.placed.cfg.embed_dim * 2}


def test_many_rows_are_bound_by_flops():
    costs = priced("llama3-8b", 4096, 128)
    assert costs.token_s(FULL, 128)["FLOPs"] == pytest.approx(2 * 4096 * 7.5e9 / 989.4e12, rel=.02)


def test_70b_on_64_h100_by_hand():
    costs = priced("llama3-70b", 512, 2048, fsdp=8, tensor=8)
    assert sent(costs)["all-gather", "fsdp", "bf16"] == pytest.approx(17.64e9 * 7 / 8, rel=2e-3)
    assert costs.sync_s(FULL) == pytest.approx(.309, rel=.02)               # a NIC of 50 GB/s each
    assert costs.slot_bytes == 2048 * 320 * 1024 / 8 and costs.cache_bytes == 64 * costs.slot_bytes


@pytest.mark.parametrize("model", [
    MODEL, dict(MODEL, num_layers=4, mixers="WF", window=20), EXPERTS,
    dict(MODEL, head_dim=24, latent=dict(kv_dim=12, rope_dim=8, query_dim=16), num_kv_heads=4),
    dict(MODEL, mixers="GF", linear=dict(key_heads=2, value_heads=4, key_dim=8, value_dim=16))], ids=str)
def test_a_slot_has_the_bytes_of_its_arrays(model):
    made, room = assembled(dict(data=1), model=model), 192
    sampler = samplers.make(made)
    costs = decode.Sampling(place(made.model.parameters(), made.run.model, sampler.ex.layout, made.mesh_spec),
                            made.layout, 4, room, functools.partial(cache.places, room=room))
    with jax.set_mesh(made.mesh):
        held = passes.empty(made.model, sampler.ex, sampler.sync.abstract(), 4, room)
    assert costs.cache_bytes == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(held))


# ---- compiled --------------------------------------------------------------------------------------------------------


CASES = {
    "whole copies": (dict(fsdp=8), "zero3", ""), "tensor": (dict(fsdp=4, tensor=2), "zero3", ""),
    "three axes": (dict(data=2, fsdp=2, tensor=2), "zero3", ""), "context": (dict(fsdp=4, context=2), "zero3", ""),
    "stored apart alone": (dict(data=4, tensor=2), "zero1", ""), "whole in training": (dict(data=4, tensor=2), "ddp", ""),
    "mlp by fsdp": (dict(data=2, fsdp=2, tensor=2), "zero3", BY_FSDP),
    "mlp by data": (dict(data=2, fsdp=2, tensor=2), "zero3", BY_FSDP.replace('"fsdp"', '"_"').replace(
        '"data"', '"fsdp"').replace('"_"', '"data"')),
    "experts": (dict(data=2, fsdp=2, tensor=2), "zero3_experts_fsdp", "")}


def made_for(case: str, tmp_path, devices, dtype: str) -> samplers.LocalSampler:
    mesh, rule, text = CASES[case]
    (tmp_path / "rules.toml").write_text(text)
    model = (EXPERTS if case == "experts" else MODEL) | dict(compute_dtype=dtype)
    return samplers.make(assembled(mesh, rule, devices, model, rl=dict(
        rules=str(tmp_path / "rules.toml") if text else "", prompts=8, samples=2)))


def check_sync(sampler: samplers.LocalSampler, cast_in_float32: bool) -> None:
    """Kinds, axes (but behind a permute) and bytes; what lives beside arguments and results is at most the largest weight twice, and the cast
    shards."""
    made, costs = sampler.made, sampler.costs
    with jax.set_mesh(made.mesh):
        program = sampler.sync.program_of(made.state_shapes.params)
    if program is None:
        assert costs.sync() == [] and costs.copy_bytes() == 0
        return
    found = audit.read(program.as_text(), made.mesh)
    assert not found.broken_permutes
    ruled, compiled, wanted = sent(costs), collections.Counter(), collections.Counter()
    permuted = any(kind == "collective-permute" for kind, *_ in ruled)
    of = lambda kind, *axes: (kind, *axes)[:1 if permuted else None]
    for row in audit.summarize(found.collectives):
        compiled[of(row["kind"], *row["axes"])] += row["bytes"]
    for (*key, dtype), count in ruled.items():
        wanted[of(*key)] += count * (2 if cast_in_float32 and dtype == "bf16" else 1)
    assert compiled.keys() == wanted.keys()
    for key in wanted:
        assert compiled[key] == pytest.approx(wanted[key], rel=.01), (key, compiled[key] / wanted[key])
    moved = [info for info in costs.placed.rows if costs.is_copied(info)]
    memory, times = program.memory_analysis(), 2 if cast_in_float32 else 1
    largest = max(map(costs.read_bytes, moved))
    cast = sum(info.size * costs.itemsize(info) / costs._moves(info).shards(costs._moves(info).before) for info in moved)
    assert memory.temp_size_in_bytes <= times * (2 * largest + cast) + 2**16
    assert memory.output_size_in_bytes == pytest.approx(costs.copy_bytes(), rel=.01, abs=1024)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_simulated_devices_send_what_the_formulas_say(case, dtype, tmp_path):
    """Theirs move float32 also where it is bfloat16."""
    check_sync(made_for(case, tmp_path, None, dtype), dtype == "bfloat16")


@needs_gpu_compiler
@pytest.mark.parametrize("case", CASES)
def test_gpus_send_what_the_formulas_say(case, tmp_path):
    check_sync(made_for(case, tmp_path, compile.topology("h100:8"), "bfloat16"), False)


def test_the_compilers_own_way_sends_more(monkeypatch, tmp_path):
    """Without the move in between."""
    plain = inference.WeightSync.moves
    monkeypatch.setattr(inference.WeightSync, "moves", lambda self, info: (
        found := plain(self, info)) and type(found)(found.before, found.before, found.after, found.sizes))
    with pytest.raises(AssertionError):
        check_sync(made_for("mlp by data", tmp_path, None, "float32"), False)


@needs_gpu_compiler
@pytest.mark.parametrize("case", ["whole copies", "three axes", "experts"])
def test_a_token_moves_no_weight_and_the_cache_lies_there_once(case, tmp_path):
    sampler = made_for(case, tmp_path, compile.topology("h100:8"), "bfloat16")
    costs, made = sampler.costs, sampler.made
    programs = sampler.programs()
    found = audit.read(programs["decode"].as_text(), made.mesh)
    largest = max(math.prod(dims) for one in found.collectives for dims in one.arrays)
    assert largest <= costs.slots * LONGEST_STRIDE, "what is drawn in a call"
    memory = programs["decode"].memory_analysis()
    assert memory.alias_size_in_bytes == pytest.approx(costs.cache_bytes, rel=.02)
    weights = sum(map(costs.read_bytes, costs.placed.rows))
    assert memory.argument_size_in_bytes == pytest.approx(weights + costs.cache_bytes, rel=.02)
    for_tensor = [sum(rows) for rows in zip(*[(row.count, row.bytes) for row in found.collectives if (
        row.kind, row.axes, row.dtype) == ("all-reduce", ("tensor",), "bf16")])]
    ruled = [one for one in costs.token() if (one.kind, one.axes, one.dtype) == ("all-reduce", ("tensor",), "bf16")]
    sizes = made.mesh_spec.sizes
    assert for_tensor == ([sum(one.runs for one in ruled), sum(one.ring_bytes(sizes) for one in ruled)] if ruled else [])


def test_moves_of_an_axis_that_leaves_before_another_permute_shards():
    found = moves((8, 64, 96), ((), ("data", "fsdp"), ("tensor",)), ((), (), ("tensor", "data")),
                  dict(data=2, fsdp=2, tensor=2))
    assert found.between == ((), ("fsdp",), ("tensor", "data")) and found.spec(found.before) == P(
        None, ("data", "fsdp"), "tensor")
    assert found.collectives(8.0 * 64 * 96) == [
        ("collective-permute", ("data", "fsdp"), 64 * 96), ("all-to-all", ("data",), 64 * 96),
        ("all-gather", ("fsdp",), 2 * 64 * 96)]


# ---- the command -----------------------------------------------------------------------------------------------------


WORDS = ("--model.vocab_size=257", "--model.embed_dim=32", "--model.num_layers=1", "--model.num_heads=2",
         "--model.mlp_dim=64", "--data.source=prompts", '--data.paths=["prompts.jsonl"]', "--data.seq_len=32",
         "--data.global_batch=8", "--training.objective=rl", "--training.steps=4", "--rl.prompts=4", "--rl.samples=4",
         "--rl.max_tokens=6", "--rl.reward=exact", "--sharding.rules=sharding_rules/zero3.toml", "--mesh.data=1",
         "--mesh.fsdp=4", "--mesh.tensor=2")


def inspected(*words) -> dict:
    ran = call(inspect.main, *WORDS, "--json", *words)
    assert ran.code == 0, ran.err
    return json.loads(ran.out)["sampling"]


def test_inspect_tells_what_sampling_costs(home):  # noqa: F811
    found = inspected("--mesh.simulated_devices=8", "--model.compute_dtype=float32")
    assert (found["slots"], found["room"]) == (16, 64)
    ruled, compiled = found["memory_bytes"]["formula"], found["memory_bytes"]["compiled"]
    for part in ("state", "weights", "cache"):      # of a slot there are 21 bytes beside keys and values
        assert compiled[part] == pytest.approx(ruled[part], rel=.01, abs=16 * 21), part
    assert found["peak_bytes"] >= compiled["total"] == sum(compiled[part] for part in (
        "state", "weights", "cache", "temporaries"))
    of = lambda name: {(row["kind"], *row["axes"]): row["bytes"] for row in found["sync"]["collectives"][name]}
    assert of("compiled") == of("formula") and of("formula").keys() == {("all-gather", "fsdp")}
    assert found["slots_that_fit"] is found["sync"]["time_s"] is found["decode"]["time_s"] is None
    text = call(inspect.main, *WORDS, "--mesh.simulated_devices=8", "--rl.lag=1")
    assert "rl.lag=1: this is the cost of sampling for validation" in text.out
    assert "sampling: 16 slots of 64 tokens on all devices" in text.out and text.code == 0


@needs_gpu_compiler
def test_inspect_prices_sampling_on_gpus(home):  # noqa: F811
    found = inspected("--topology=h100:8", "--rl.slots=12")
    assert found["slots"] == 12 and found["slots_that_fit"] > 10_000 and found["slots_that_fit"] % 4 == 0
    time = found["decode"]["time_s"]
    assert time["total"] == pytest.approx(time["HBM"] + time["collectives"] + time["gaps"])
    assert found["decode"]["tokens_per_s_per_gpu"] == pytest.approx(12 / time["total"] / 8)
    assert found["sync"]["time_s"] > 0
    assert found["decode"]["batch_s_at_most"] == pytest.approx(2 * 6 * time["total"])       # 16 answers in 12 slots
    text = call(inspect.main, *WORDS, "--topology=h100:8").out
    assert "slots fit" in text and "tokens/s a GPU" in text


@needs_gpu_compiler
def test_as_many_slots_as_fit():
    model = MODEL | dict(vocab_size=128256, embed_dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, mlp_dim=14336)
    devices, asked = compile.topology("h100:8"), dict(prompts=512, samples=16)
    with_ = lambda mesh, **rl: samplers.make(assembled(mesh, "zero3", devices, model | dict(
        compute_dtype="bfloat16"), rl=asked | rl), 2048)
    costs = with_(dict(fsdp=8)).costs
    assert costs.slots % 8 == 0 and 8 * 100 < costs.slots < 512 * 16
    state = 8.03e9 * 12 / 8
    free = .9 * hardware.usable_bytes(hardware.get("h100")) - state - costs.copy_bytes()
    assert free - costs.slot_bytes < costs.cache_bytes <= free + 1e-3 * state
    assert with_(dict(fsdp=8), slots=64).costs.slots == 64
    with pytest.raises(config.ConfigError, match="no answer can be sampled: 72.8 GiB are usable on h100"):
        samplers.make(assembled(dict(data=8), "ddp", devices, model | dict(compute_dtype="bfloat16"), rl=asked), 2048)


def test_other_objectives_have_no_sampling(home):  # noqa: F811
    others = [word for word in WORDS if not word.startswith(("--rl.", "--data.source", "--data.paths", "--training.obj"))]
    ran = call(inspect.main, *others, "--mesh.simulated_devices=8", "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["sampling"] is None


def test_plan_tells_what_answers_cost_and_takes_no_stages(home):  # noqa: F811
    file = home / "rl.toml"
    file.write_text('[model]\npreset = "llama3-8b"\n[data]\nsource = "prompts"\npaths = ["x.jsonl"]\nseq_len = 2048\n'
                    'global_batch = 64\n[training]\nobjective = "rl"\n[rl]\nreward = "exact"\nmax_tokens = 1024\n')
    asked = str(file), "--gpus=8", "--gpu=h100", "--remat=full", "--microbatches=2"
    plans = json.loads(call(plan.main, *asked, "--json").out)["plans"]
    assert {one["mesh"]["stage"] for one in plans} == {1}
    whole = next(one for one in plans if one["mesh"]["fsdp"] == 8 and one["rules"].endswith("zero3.toml"))["sampling"]
    by_hand = priced("llama3-8b", 512, 2048, fsdp=8)
    usual = Rates(hardware.get("h100"), Assumptions("h100"))
    assert (whole["slots"], whole["weights_bytes"], whole["sync_s"]) == (
        512, round(by_hand.copy_bytes()), by_hand.sync_s(usual))
    assert whole["batch_s_at_most"] == pytest.approx(1024 * sum(by_hand.token_s(usual, 2048).values()))
    text = call(plan.main, *asked).out
    assert "Sampling under the first plan, once a batch of answers: weights to the sampler" in text
    few = call(plan.main, *asked, "--max-memory=24", "--fsdp=8").out
    assert "NO slot fits" in few


def test_plan_prices_a_sampler_apart_by_hand(home):  # noqa: F811
    """8B in bfloat16, split over the 8 GPUs of a host; a quarter of 64 × 8 answers together, 2,048 tokens each, of
    which a token has 128 KiB of keys and values."""
    file = home / "apart.toml"
    file.write_text('[model]\npreset = "llama3-8b"\n[data]\nsource = "prompts"\npaths = ["x.jsonl"]\nseq_len = 2048\n'
                    'global_batch = 64\n[training]\nobjective = "rl"\n[rl]\nreward = "exact"\nmax_tokens = 1024\n'
                    'lag = 1\n')
    asked = str(file), "--gpus=16", "--gpu=h100", "--remat=full", "--microbatches=2"
    found = json.loads(call(plan.main, *asked, "--json").out)["plans"][0]["sampling"]
    assert (found["gpus"], found["tensor"], found["slots"]) == (8, 8, 128)
    assert found["file_bytes"] == pytest.approx(2 * 8.03e9, rel=1e-3)
    assert found["weights_bytes"] == pytest.approx(2 * 8.03e9 / 8, rel=1e-2)
    assert found["cache_bytes"] == 128 * 2048 * 128 * 1024 / 8 and found["slots_that_fit"] > 128
    read = found["weights_bytes"] - 2 * 128256 * 4096 / 8 + found["cache_bytes"]       # of the embedding a few rows
    assert found["token_s"] > read / hardware.get("h100").hbm_bytes_per_s
    assert found["batch_s_at_most"] == pytest.approx(4 * 1024 * found["token_s"])
    text = call(plan.main, *asked).out
    assert "A separate sampler with the 8 GPUs of a host (tensor 8): " in text and "weights is 15.0 GiB, written once" in text
    with_adapters = json.loads(call(plan.main, *asked, "--json", "--lora.rank=16").out)["plans"][0]["sampling"]
    assert with_adapters["file_bytes"] < 0.01 * found["file_bytes"], "they alone are written with each version"
    file.write_text(file.read_text() + "slots = 100000\n")
    assert "FIT: set rl.slots" in call(plan.main, *asked).out
