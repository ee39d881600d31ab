"""What experts cost in closed formulas: rows and tiles, which dispatch and which layout sends less, and plans for them.
That the formulas are those of compiled programs, and what these send and multiply: `test_gpu_formulas`."""
import contextlib
import dataclasses
import functools
import io
import json

import pytest

from meshtrain import config, design, run_files
from meshtrain.commands import plan
from meshtrain.cost.formulas import traffic
from meshtrain.cost.formulas.options import Options
from meshtrain.cost.formulas.place import place
from meshtrain.cost.planner import search
from meshtrain.cost.program import audit
from meshtrain.kernels import grouped
from meshtrain.model import transformer
from meshtrain.sharding import rules
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.shipped import locate_shipped
from test_roofline import ADD, PEAK, lined, loop, program

MESH = MeshSpec(dict(fsdp=8)).abstract()
QWEN, MIXTRAL = "qwen3-30b-a3b", "mixtral-8x7b"


@functools.cache
def table(preset: str):
    cfg = run_files.load(["configs/quickstart.toml", "--model.preset", preset, "--model.compute_dtype", "bfloat16"]).model
    return cfg, transformer.build(cfg).parameters()


def placed(preset: str, rule: str, **mesh):
    cfg, rows = table(preset)
    spec = MeshSpec(mesh)
    return place(rows, cfg, rules.Layout(rules.load(locate_shipped(f"sharding_rules/{rule}.toml")), spec.sizes), spec)


def sent_for_experts(of, options: Options) -> float:
    """Bytes of a layer and microbatch in the compute dtype and float32, for tokens or for weights: not for choices."""
    found = [sent for sent in traffic.of(of, options) if sent.label in (traffic.ROUTED, traffic.EXPERTS)
             and sent.dtype != "s32"
             and not (sent.label == traffic.ROUTED and sent.dtype == "f32")]
    return sum(sent.ring_bytes(of.mesh.sizes) for sent in found) / of.cfg.num_layers / options.microbatches


def tokens_of(T: int, dispatch: str = "auto") -> Options:
    return Options(seq_len=T, global_batch=8, dispatch=dispatch)


@pytest.mark.parametrize("preset, T", [(QWEN, 29_491), (MIXTRAL, 34_406)])
def test_tokens_are_cheaper_to_send_than_experts_up_to_the_length_that_the_page_says(preset, T):
    by_tokens, by_weights = placed(preset, "zero3_experts_fsdp", fsdp=8), placed(preset, "zero3", fsdp=8)
    for shorter in (True, False):
        options = tokens_of(int(T * (0.99 if shorter else 1.01)), "gather")
        assert (sent_for_experts(by_tokens, options) < sent_for_experts(by_weights, options)) == shorter


@pytest.mark.parametrize("preset, num_shards, method",
                         [(QWEN, 8, "gather"), (QWEN, 16, "all_to_all"), (MIXTRAL, 2, "gather"),
                          (MIXTRAL, 4, "all_to_all")])
def test_auto_takes_the_dispatch_that_sends_less(preset, num_shards, method):
    of = placed(preset, "zero3_experts_fsdp", fsdp=num_shards)
    options = Options(4096, num_shards)
    assert of.route(options).by_all_to_all == (method == "all_to_all")
    each = {name: sent_for_experts(of, dataclasses.replace(options, dispatch=name))
            for name in ("gather", "all_to_all")}
    assert sent_for_experts(of, options) == pytest.approx(min(each.values()), rel=0.001)      # rooms are rounded up


def test_rows_are_those_that_the_tokens_of_all_ways_choose_and_tiles_fill_half_a_block_of_each_expert():
    found = placed(QWEN, "zero3_experts_fsdp", fsdp=8).route(Options(4096, 8))
    assert (found.seen, found.rows.even, found.sizes.num_experts) == (8 * 4096, 4096 * 8, 16)
    assert found.rows.executed == 4096 * 8 + 16 * 64 and found.rows.held == 1.25 * 4096 * 8 + 16 * 128
    assert grouped.count_executed_rows(10, 20, 128) == 10 * 128, "a block for each expert that has a row"


@pytest.mark.parametrize("rule, mesh", [("zero3_experts_fsdp", dict(fsdp=8)), ("zero3_experts_tensor", dict(tensor=8)),
                                        ("zero3", dict(fsdp=8)),
                                        ("zero3_experts_tensor", dict(context=2, tensor=4))])
def test_all_layouts_multiply_the_same_rows_but_for_those_that_fill_up_blocks(rule, mesh):
    found = placed(QWEN, rule, **mesh).route(Options(8192, 64))
    assert found.rows.even == 64 * 8192 * 8 / 8 and found.rows.even <= found.rows.executed <= 1.1 * found.rows.even


def test_without_stages_a_step_works_through_leading_dense_layers_like_through_others():
    """Formulas of a layer are then of the mean of both kinds."""
    cfg = run_files.load(["configs/quickstart.toml", "--model.preset", QWEN, "--model.mlps", "dddddddde*"]).model
    spec, options = MeshSpec(dict(fsdp=4, tensor=2)), Options(4096, 8, microbatches=2)
    layout = rules.Layout(rules.load(locate_shipped("sharding_rules/zero3_experts_tensor.toml")), spec.sizes)
    found = place(transformer.build(cfg).parameters(), cfg, layout, spec)
    assert found.visits(options) == (2 * 48,) * 3 and found.route(options).share == 40 / 48


# ---- plans -----------------------------------------------------------------------------------------------------------


def asked(words: str) -> tuple[config.Run, search.Question]:
    options = plan.COMMAND.read(words.split())
    run = plan.run_of(options)
    return run, plan.question_of(run, options, *options["gpus"])


def test_plans_of_experts_are_run_files_that_load_with_every_kind_of_layout_among_them(tmp_path):
    run, question = asked(f"{QWEN} --gpus 16 --gpu h200 --seq-len 4096 --global-batch 64 --model.num_layers 12")
    plans = search.search(question).plans
    named = {one.rules.path.removeprefix("sharding_rules/").removesuffix(".toml") for one in plans}
    assert {"zero3", "zero3_experts_fsdp", "zero3_experts_tensor"} <= named
    assert any("zero3_experts_fsdp.toml" in one.rules.path and one.sizes["data"] == 1
               for one in plans), "experts over all GPUs"
    model = transformer.build(run.model)
    for k, one in enumerate(plans[:30]):
        path = tmp_path / f"{k}.toml"
        path.write_text(plan.run_file(run, one, str(path)))
        again = run_files.load([str(path)])
        assert design.lay_out(again, config.mesh_sizes(again, 16), one.rules, model).faults == []


@pytest.mark.parametrize("words", [
    f"{QWEN} --gpus 8 --gpu h200 --model.mlps de*",
    f"{MIXTRAL} --gpus 64 --gpu h100 --model.shared_expert_dim 1024",
    f"{QWEN} --gpus 12 --gpu h200 --model.num_experts 24 --model.experts_per_token 1 --global-batch 48",
    "olmoe-1b-7b --gpus 8 --gpu a100-80gb --experts.dispatch all_to_all"])
def test_any_mixture_has_a_plan(words):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = plan.main([*words.split(), "--json"])
    assert code == 0, err.getvalue()
    found = json.loads(out.getvalue())
    assert found["plans"][0]["fits"] and 0.02 < found["plans"][0]["mfu"] < 0.6


def test_experts_whose_tokens_cannot_be_sent_are_planned_with_those_that_can():
    _, question = asked(f"{QWEN} --gpus 8 --gpu h200 --global-batch 64 --experts.dispatch all_to_all")
    plans = search.search(question).plans
    assert plans and all(one.placed.route(one.options).by_all_to_all for one in plans)


def test_a_dense_model_is_not_planned_with_rule_files_of_experts():
    _, question = asked("llama3-8b --gpus 8 --gpu h100 --global-batch 64")
    assert not any("expert" in one.path for one in question.rule_files)


# ---- what a compiled program shows -----------------------------------------------------------------------------------

SCOPE = "jit(f)/shard_map/balanced_rows_40000"


def kernel(name: str, operands: str, result: str) -> str:
    return program(f"""%g = s32[16]{{0}} iota(), iota_dimension=0
      %x = bf16[51200,2048]{{1,0}} iota(), iota_dimension=0
      %y = bf16[51200,768]{{1,0}} iota(), iota_dimension=0
      %w = bf16[16,2048,768]{{2,1,0}} iota(), iota_dimension=0
      ROOT %o = {result} custom-call({operands}), custom_call_target="__gpu$xla.gpu.triton", metadata={{op_name="{SCOPE}/{name}/pallas_call"}}""")


@pytest.mark.parametrize("name, operands, result", [
    ("grouped_rows_gkn", "%g, %g, %x, %w", "bf16[51200,768]{1,0}"),
    ("grouped_rows_gnk", "%g, %g, %y, %w", "bf16[51200,2048]{1,0}"),
    ("grouped_rows_gnk", "%g, %g, %y, %w, %y, %w", "bf16[51200,2048]{1,0}"),
    ("grouped_outer_kgn", "%g, %g, %x, %y", "f32[2048,16,768]{2,1,0}")])
def test_experts_kernels_multiply_the_rows_that_their_scope_tells_and_what_fills_up_blocks(name, operands, result):
    text = kernel(name, operands, result)
    line = lined(text, **{"grouped.rows": 0.5, "grouped.outer": 0.25})
    (one,) = (one for one in line.kernels if "grouped" in one.source)
    assert one.flops == operands.count("%w, %y") * 2 * (40000 + 16
                                                        * 64) * 2048 * 768 + 2 * (40000 + 16
                                                                                  * 64) * 2048 * 768 and one.part == "matmul" and not line.uncounted
    assert one.seconds == pytest.approx(one.flops / PEAK / (0.25 if "outer" in name else 0.5))
    found = audit.read(text, MESH)
    assert found.flops == {"bf16": one.flops} and not found.uncounted


def test_rows_that_are_taken_by_number_count_as_often_as_they_are_taken():
    """From few tokens or from many, what a kernel takes costs what it would if it lay there row by row."""
    whole = kernel("grouped_rows_gkn", "%g, %g, %x, %w, %y", "bf16[51200,768]{1,0}")
    (beside,) = (one for one in lined(whole).kernels if "grouped" in one.source)
    for tokens in (4096, 409600):
        taken = whole.replace("%w = ",
                              f"%t = bf16[{tokens},2048]{{1,0}} iota(), iota_dimension=0\n  %n = s32[51200]{{0}} "
                              f"iota(), iota_dimension=0\n  %w = "
                              ).replace("custom-call(%g, %g, %x,", "custom-call(%g, %g, %t, %n,")
        (one,) = (one for one in lined(taken).kernels if "grouped" in one.source)
        assert one.flops == beside.flops and one.hbm_bytes == beside.hbm_bytes + 4 * 51200


def test_further_rounds_count_as_none_but_for_whoever_assumes_some():
    text = loop(5, "%k = f32[1024,1024]{1,0} fusion(%w, %w), kind=kLoop, calls=%add_body", ADD).replace(
        'backend_config={"known_trip_count":{"n":"5"}}',
        f'metadata={{op_name="{SCOPE}/further_rounds/while"}}').replace(
        "constant(true)", "custom-call()").replace("  %l = ", "  %apart = f32[1024,1024]{1,0} add(%y, %z)\n  %l = ")
    runs = lambda **given: [one.runs for one in lined(text, **given).kernels]
    assert runs() == [1] and sorted(runs(**{"experts.rounds": 3})) == [1, 3] and not lined(text).unknown_loops
    gather = text.replace("fusion(%w, %w), kind=kLoop, calls=%add_body",
                          "all-reduce(%w), replica_groups={}, to_apply=%add_body")
    found = audit.read(gather, MESH)
    assert found.further_rounds == 1 and not found.collectives and not found.unknown_loops
    assert audit.read(gather.replace("further_rounds", "others"), MESH).unknown_loops
