"""The first minutes on a GPU, without one: its items at tiny sizes on simulated devices, and what it does with them."""
import functools
import json
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import sampling

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))       # benchmarks is installed nowhere

import crashing  # noqa: E402
from benchmarks import (  # noqa: E402
    gpu, gpu_attention, gpu_flags, gpu_kernels, gpu_record, gpu_sampling, gpu_speed, gpu_steps, grouped_tiles)
from benchmarks import tiles as tile_timing  # noqa: E402
from benchmarks.gpu_record import BEGUN, FAILED, RIGHT, WRONG, Item, Record  # noqa: E402
from meshtrain import assembly, config  # noqa: E402
from meshtrain import hardware
from meshtrain.cost.program import compile
from meshtrain.cost.program.compiled import CompiledProgram
from meshtrain.inspection import memory
from meshtrain.cost.formulas import attention_pairs  # noqa: E402
from meshtrain.kernels import blockwise, grouped, recurrence_pallas  # noqa: E402
from meshtrain.kernels.engine import CAUSAL, WHOLE  # noqa: E402
from meshtrain.kernels.tiles import Blocks, GroupedBlock, GroupedTiles, Tiles  # noqa: E402

CPU = lambda: jax.devices()[-1]         # stands for the host's beside the devices under test
SMALL = gpu_attention.Sizes(rows=2, queries=40, other_keys=24, heads=4, kv_heads=2, widths=((16, 16), (16, 8)),
                            tiles=Tiles(*[Blocks(16, 16, 4, 2)] * 3), block=16)
FOREVER = time.time() + 1e9


def record(directory, **of) -> Record:
    return Record(directory, "none", {"gpu": "none", "count": 1, "code": "1"} | of)


def did(directory) -> dict[str, str]:
    """key → status, as it lies on the disk."""
    return {key: item["status"] for key, item in json.loads((directory / "gpu-none.json").read_text())["items"].items()}


# ---- what the command does with its items ----------------------------------------------------------------------------


def test_an_item_that_raises_is_recorded_with_its_error_and_the_others_go_on(tmp_path):
    def broken():
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
    items = [Item("attention/broken", broken), Item("layout/right", lambda: {"compared": {"o": (1e-3, 1e-2)}}),
             Item("layout/wrong", lambda: {"compared": {"o": (1e-3, 1e-2), "dk": (2e-2, 1e-2)}}),
             Item("layout/nan", lambda: {"compared": {"o": (float("nan"), 1e-2)}})]
    assert gpu.work(items, record(tmp_path), FOREVER, jax.devices()[:1]) == gpu.DONE
    assert did(tmp_path) == {"attention/broken": FAILED, "layout/right": RIGHT, "layout/wrong": WRONG,
                             "layout/nan": WRONG}
    page = (tmp_path / "gpu-none.md").read_text()
    assert "`attention/broken`: RuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS" in page
    assert "1 right, 2 WRONG, 1 FAILED" in page
    assert "dk 0.02 of 0.01" in page


def test_the_page_says_what_auto_should_take_once_both_engines_have_run():
    step = lambda seconds, status=RIGHT: {"status": status, "row": {"step, s": f"{seconds:.4g}"}}
    engines, mlps = (choice.of for choice in gpu_record.CHOICES)
    items = {engines["pallas"]: step(7.1)}
    assert gpu_record.advice(items) == []
    items[engines["mosaic"]] = step(6.6)
    assert "should take **mosaic** here (pallas 7.1 s a step and mosaic 6.6 s a step)" in gpu_record.advice(items)[1]
    items["attention/mosaic, head_dim 128"] = {"status": WRONG}
    items[mlps["mosaic"]] = step(6.5)
    of_attention, of_mlp = gpu_record.advice(items)[1::2]
    assert "should take **pallas** here (mosaic is not right: attention/mosaic, h" in of_attention
    assert '`model.mlp = "auto"` should take **mosaic** here (xla 6.6 s a step and mosaic 6.5 s a step)' in of_mlp
    items["kernel/MLP with Mosaic, geglu"] = {"status": WRONG}
    assert "should take **xla** here (mosaic is not right: kernel/MLP" in gpu_record.advice(items)[3]


def test_a_run_that_was_cut_off_goes_on_where_it_was(tmp_path):
    calls = []

    def item(key, cut=False):
        def measure():
            calls.append(key)
            if cut and calls.count(key) == 1:
                raise KeyboardInterrupt
            return {}
        return Item(f"layout/{key}", measure)
    items = [item("a"), item("b", cut=True), item("c")]
    with pytest.raises(KeyboardInterrupt):
        gpu.work(items, record(tmp_path), FOREVER, ())
    assert did(tmp_path) == {"layout/a": RIGHT, "layout/b": BEGUN}
    assert gpu.work(items, record(tmp_path, date="tomorrow", commit="of the tables"), FOREVER, ()) == gpu.DONE
    assert calls == ["a", "b", "c", "b"] and set(did(tmp_path).values()) == {RIGHT}       # what was cut off comes last
    gpu.work(items, record(tmp_path, code="2"), FOREVER, ())                              # other code: nothing counts
    assert calls[4:] == ["a", "b", "c"]


def test_an_item_that_is_cut_off_twice_has_failed(tmp_path):
    def cut():
        raise KeyboardInterrupt
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            gpu.work([Item("layout/a", cut)], record(tmp_path), FOREVER, ())
    assert gpu.work([Item("layout/a", cut)], record(tmp_path), FOREVER, ()) == gpu.DONE
    assert did(tmp_path) == {"layout/a": FAILED}


def test_what_is_too_long_for_the_minutes_left_makes_way_and_is_done_in_the_next_run(tmp_path):
    items = [Item("speed/long", dict, seconds=1e6), Item("layout/short", dict, seconds=1)]
    gpu.work(items, record(tmp_path), time.time() + 100, ())
    assert did(tmp_path) == {"layout/short": RIGHT}
    gpu.work(items, record(tmp_path), FOREVER, ())
    assert set(did(tmp_path)) == {"layout/short", "speed/long"}


def test_an_item_that_wants_an_empty_gpu_gets_a_process_of_its_own(tmp_path):
    items = [Item("layout/a", dict), Item("speed/b", dict, alone=True), Item("layout/c", dict)]
    ends = [gpu.work(items, record(tmp_path), FOREVER, ()) for _ in range(3)]
    assert ends == [gpu.AGAIN, gpu.AGAIN, gpu.DONE] and len(did(tmp_path)) == 3


def test_a_process_that_crashes_or_hangs_fails_its_item_alone(tmp_path, capfd):
    code, found = gpu.supervise(crashing.worker, (tmp_path,), FOREVER, longest_s=2)
    assert code == gpu.DONE and did(tmp_path) == {"layout/crash": FAILED, "layout/hang": FAILED, "layout/right": RIGHT}
    assert "ended with code 9" in found.items["layout/crash"]["errors"][""]
    assert "no end within" in found.items["layout/hang"]["errors"][""]


def test_processes_side_by_side_write_one_record_and_leave_what_is_timed(tmp_path):
    gpu.side_by_side(crashing.sharing, tmp_path, FOREVER, gpu.Asked(jobs=2))
    found = json.loads((tmp_path / "gpu-none.json").read_text())
    assert set(found["items"]) == {item.key for item in crashing.KINDS} and found["planned"][-1] == "speed/d"
    processes = [found["items"][item.key]["process"] for item in crashing.KINDS]        # those of one kind have one
    assert processes[::2] == processes[1::2] and len(set(processes)) == 2
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in gpu.os.environ


def test_keys_that_no_item_has_are_the_users_mistake(tmp_path, capsys, monkeypatch):
    asked = gpu.Asked(patterns=("atention/*",))
    assert gpu.compute(SimpleNamespace(send=list), jax.devices()[:1], CPU(), tmp_path, FOREVER, asked) == gpu.NOTHING
    monkeypatch.setattr(gpu.local_devices, "gpus_expected", lambda: True)
    monkeypatch.setattr(gpu.local_devices, "prepare_gpus", lambda environ: None)
    monkeypatch.setattr(gpu, "supervise", lambda *args: (gpu.NOTHING, None))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert gpu.main(["--out", str(tmp_path), "--items", "atention/*"]) == 2
    assert "no item fits --items atention/*" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_patterns_name_items():
    items = [Item("attention/a", dict), Item("speed/8B, packed", dict), Item("tiles/b", dict)]
    asked = gpu.Asked(("attention", "speed"), ("*8B*", "tiles/*"))
    assert [item.key for item in asked.planned(items)] == ["speed/8B, packed"]


def test_a_share_of_memory_that_is_none_is_refused_before_anything_is_begun(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu.local_devices, "gpus_expected", lambda: True)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "92%")
    assert gpu.main(["--out", str(tmp_path / "new")]) == 2 and not (tmp_path / "new").exists()
    assert "92% is not a share of a GPU's memory" in capsys.readouterr().err


def test_the_process_that_computes_takes_every_item_once_and_tells_the_other_of_it(tmp_path, monkeypatch):
    devices, news = jax.devices()[:2], []
    items = gpu.by_worth(devices, CPU(), tmp_path)
    assert len({item.key for item in items}) == len(items)
    assert {item.group for item in items} == set(gpu_record.GROUPS) - {"kernel", "engines", "tiles"}
    made = [module.items(*args) for module, args in (
        (gpu_attention, (devices, CPU())), (gpu_steps, (devices, CPU())), (gpu_speed, (devices, tmp_path)),
        (gpu_sampling, (devices, tmp_path)), (gpu_flags, (devices,)))]
    assert {item.key for item in items} == {item.key for part in made for item in part}
    monkeypatch.setattr(gpu, "by_worth", lambda *args: [item._replace(measure=dict) for item in items])
    pipe = SimpleNamespace(send=news.append)
    asked = gpu.Asked(("attention", "deterministic"))
    assert gpu.compute(pipe, devices, CPU(), tmp_path, FOREVER, asked) == gpu.DONE
    assert news[0][:3] == ("record", tmp_path, "cpu-x2")
    assert [what for what, *_ in news[1:]] == ["begin", "end"] * (len(news) // 2)
    found = Record(*news[0][1:])
    assert set(found.items) == {item.key
                                for item in items if item.group in ("attention", "deterministic")} and not found.left


def test_without_a_gpu_the_command_says_so_in_one_line(capsys, tmp_path):
    assert gpu.main(["--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and "nvidia-smi" in said and not list(
        tmp_path.iterdir())


# ---- what the items find ---------------------------------------------------------------------------------------------


@pytest.fixture
def some_cases(monkeypatch):
    """(names) → the items look at these cases alone."""
    every = gpu_attention.cases
    named = lambda names: lambda *args: [case for case in every(*args) if case.name in names]
    return lambda *names: monkeypatch.setattr(gpu_attention, "cases", named(names))


def attention_of(name: str, of: str = "head_dim 16") -> dict:
    items = gpu_attention.items(jax.devices()[:1], CPU(), SMALL)
    return next(item for item in items if item.key == f"attention/{name}, {of}").measure()


def test_every_kind_of_block_is_compared():
    found = attention_of("blockwise")
    assert gpu_record.verdict(found) == RIGHT, found
    assert len({what.partition(":")[0] for what in found["compared"]}) == 8 and len(found["compared"]) == 8 * 5 + 4


def test_pallas_kernels_are_found_right(some_cases):
    some_cases("rows that see nothing")
    found = attention_of("pallas")
    assert gpu_record.verdict(found) == RIGHT and len(found["compared"]) >= 5, found


def test_values_may_be_narrower_than_keys(some_cases):
    some_cases("documents", "rows that see nothing")
    assert gpu_record.verdict(found := attention_of("blockwise", "head_dim 16, values of 8")) == RIGHT, found


WRONG_ENGINES = {
    "o": lambda engine: engine._replace(
        forward=lambda *a, **k: (lambda o, lse: (1.05 * o, lse))(*engine.forward(*a, **k))),
    "lse": lambda engine: engine._replace(
        forward=lambda *a, **k: (lambda o, lse: (o, lse + .1))(*engine.forward(*a, **k))),
    "documents": lambda engine: engine._replace(
        forward=lambda q, k, v, s, z, **more: engine.forward(q, k, v, 0 * s, 0 * z, **more)),
    "the last key": lambda engine: engine._replace(
        backward=lambda *a, **k: (lambda dq, dk, dv: (dq, dk.at[:, -1].set(0), dv))(*engine.backward(*a, **k))),
    "its own lse": lambda engine: engine._replace(
        backward=lambda *a, mask: engine.backward(*a[:5], *engine.forward(*a[:5], mask=mask), a[7], mask=mask)),
}


@pytest.mark.parametrize("fault", WRONG_ENGINES)
def test_a_wrong_engine_is_found_wrong(fault, some_cases):
    some_cases("documents over two chunks")
    found = gpu_attention.measured(lambda: WRONG_ENGINES[fault](blockwise.engine(16)),
                                   (16, 16), True, SMALL, jax.devices()[0], CPU())
    assert gpu_record.verdict(found) == WRONG


def test_a_case_that_raises_is_told_and_the_other_cases_go_on(some_cases):
    some_cases("whole rows", "an earlier chunk")

    def forward(*args, mask):
        raise ValueError("no kernel for this") if mask.causal else ZeroDivisionError
    make = lambda: blockwise.engine(16)._replace(forward=forward)
    found = gpu_attention.measured(make, (16, 16), True, SMALL, jax.devices()[0], CPU())
    assert gpu_record.verdict(found) == FAILED
    assert found["errors"] == {"whole rows": "ValueError: no kernel for this",
                               "an earlier chunk": "ZeroDivisionError: "}


TILES = GroupedBlock(16, 16, 16, 4, 2)
GROUPED = grouped.kernels(dict.fromkeys((2, 4), GroupedTiles(TILES, TILES, TILES, TILES)), interpret=True)
NARROW_ROWS = gpu_kernels.Sizes(groups=(5, 0, 33, 16), contracted=32, columns=48, tokens=43, heads=2, width=16)


@pytest.mark.parametrize("dtype", gpu_kernels.TOLERANCE)
def test_grouped_matmuls_are_found_right_and_wrong(dtype):
    compare = lambda engine: gpu_kernels.compare_grouped(engine, "gkn", dtype, NARROW_ROWS, jax.devices()[0], CPU())
    assert gpu_record.verdict(compare(GROUPED)) == RIGHT
    shifted = GROUPED._replace(take=lambda a, number: GROUPED.take(a, jax.numpy.roll(number, 1)))
    wrong = compare(shifted)["compared"]
    assert wrong["rows"][0] > .1 and wrong["outer products"][0] > .1 and wrong["rows backward"][0] < 1e-2


@pytest.mark.parametrize("kind", gpu_kernels.KINDS)
def test_recurrences_are_found_right_and_wrong(kind):
    of = *gpu_kernels.KINDS[kind], NARROW_ROWS, jax.devices()[0], CPU()
    small = recurrence_pallas.engine(recurrence_pallas.Launch(chunk=16, columns=16, key_columns=16, interpret=True))
    assert gpu_record.verdict(gpu_kernels.compare_recurrence(small, *of)) == RIGHT
    slower = lambda q, k, v, g, *rest: small(q, k, v, .9 * g, *rest)
    assert gpu_record.verdict(gpu_kernels.compare_recurrence(slower, *of)) == WRONG


def test_float8_products_are_found_right():
    found = gpu_kernels.compare_float8(NARROW_ROWS._replace(tokens=64), jax.devices()[0])
    assert gpu_record.verdict(found) == RIGHT and set(found["compared"]) == {"forward", "dx", "dw"}


# ---- steps -----------------------------------------------------------------------------------------------------------

NARROW_MODEL = dict(vocab_size=64, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=64)
SHORT = gpu_steps.Sizes(model=tuple(NARROW_MODEL.items()), seq_len=32, sequences=16, microbatches=2)
DEEP = SHORT._replace(model=tuple((NARROW_MODEL | dict(num_layers=8)).items()), sequences=32, microbatches=4)
STEPS = {item.key: item for item in gpu_steps.items(jax.devices()[:-1], jax.devices()[-1], SHORT)}
EIGHT = {item.key: item for item in gpu_steps.items(jax.devices(), jax.devices()[0], DEEP)}


def test_every_rule_file_and_schedule_is_an_item_in_both_dtypes():
    for dtype in ("bfloat16", "float32"):
        assert {path.stem for path in gpu_steps.RULES.glob("*.toml")} == {rule for rule, *_ in gpu_steps.LAYOUTS}
        assert {f"layout/{' '.join(layout)}, {dtype}" for layout in gpu_steps.LAYOUTS} < set(EIGHT)
        offered = set(config.Pipeline.model_fields["schedule"].annotation.__args__) - {"auto"}
        has = {key for key in EIGHT if key.startswith("schedule") and key.endswith(dtype)}
        assert has == {f"schedule/{name}, {dtype}" for name in offered}


def test_meshes_use_every_axis_of_a_layout_as_far_as_devices_go():
    assert gpu_steps.mesh_for(("stage", "tensor", "context"), 8) == dict(stage=2, tensor=2, context=2, fsdp=1)
    assert gpu_steps.mesh_for(("stage", "tensor", "context"), 2) == dict(stage=2, fsdp=1)
    assert gpu_steps.mesh_for(("data",), 8) == dict(data=2, fsdp=4) and gpu_steps.mesh_for((), 1) == dict(fsdp=1)


@pytest.mark.parametrize("count", [8, *(pytest.param(count, marks=pytest.mark.long) for count in (1, 2))])
def test_runs_of_every_rule_file_and_schedule_are_accepted_at_their_full_sizes(count):
    for item in gpu_steps.items(jax.devices()[:count], CPU(), gpu_steps.Sizes(dtypes=("bfloat16",))):
        assembly.assemble(item.measure.args[0], jax.devices()[:count])


@pytest.mark.parametrize("key, said", [
    ("zero3 tensor, float32", "tensor"),
    pytest.param("zero3 tensor, bfloat16", "tensor", marks=sampling.GRID),
    pytest.param("zero3 context, whole rows, bfloat16", "context", marks=sampling.GRID)])
def test_steps_are_found_right(key, said):
    found = STEPS[f"layout/{key}"].measure()
    assert gpu_record.verdict(found) == RIGHT and said in found["said"], found
    assert len(found["compared"]) == 2 + 12


@pytest.mark.long
@pytest.mark.parametrize("key", EIGHT)
def test_steps_on_eight_devices_are_found_right(key):
    found = EIGHT[key].measure()
    assert gpu_record.verdict(found) == RIGHT, found


@pytest.mark.parametrize("dtype, error", [("float32", 1e-3), ("bfloat16", .1)])
def test_a_wrong_gradient_and_a_wrong_loss_are_found_wrong(dtype, error):
    _, losses, grads = gpu_steps.reference(SHORT, CPU())
    assert all(a <= b for a, b in gpu_steps.compare(losses, grads, losses, grads, dtype).values())
    wrong = jax.tree.map(np.copy, grads)
    wrong["layers"]["attention"]["key"]["kernel"] *= 1 + error
    found = gpu_steps.compare([losses[0], losses[1] * 1.01], wrong, losses, grads, dtype)
    beyond = [what for what, (error, tolerance) in found.items() if not error <= tolerance]
    assert beyond == ["loss of step 2", "gradient of layers/attention/key/kernel"]


def test_other_bits_are_found_wrong(monkeypatch):
    item = gpu_steps.items(jax.devices()[:1], CPU(), SHORT)[-1]
    assert item.key == "deterministic/zero3, bfloat16"
    assert gpu_record.verdict(item.measure()) == RIGHT
    rng, batch = np.random.default_rng(0), gpu_steps.batch

    def drifting(step, run):
        return batch(step, run) | {"tokens": rng.integers(0, 64, (16, 32), np.int32)}
    monkeypatch.setattr(gpu_steps, "batch", drifting)
    assert gpu_record.verdict(item.measure()) == WRONG


def test_one_device_compiles_one_program_for_all_rule_files():
    one = {item.key: item for item in gpu_steps.items(jax.devices()[:1], CPU(), SHORT)}
    assert not [key for key in one if key.startswith("schedule")] and "layout/ddp, float32" not in one
    device = jax.devices()[:1]
    for rule in ("ddp", "zero3"):
        found = gpu_steps.check(gpu_steps.run_of(rule, {}, "float32", SHORT), device, CPU(), SHORT)
    assert "compared before" in found["said"]


# ---- speed -----------------------------------------------------------------------------------------------------------

NARROW = tuple("--model.embed_dim 32 --model.num_heads 4 --model.num_kv_heads 2 --model.head_dim 16 --model.mlp_dim 64 "
               "--model.vocab_size 257 --model.num_layers 2 --data.seq_len 64 --optimizer.learning_rate 1e-2".split())
TINY = gpu_speed.Sizes(plans=(gpu_speed.Plan("8B", "configs/llama3-8b.toml", 1, True, "selective", NARROW),),
                       microbatches=2, warm=1, steps=3, profiled=1, to_profile={})


@pytest.fixture
def compiled_once(monkeypatch):
    monkeypatch.setattr(gpu_speed, "compiled", lambda *args, made=gpu_speed.compiled: tiny_program(made))


tiny_program = functools.cache(lambda compiled: compiled(TINY.plans[0], jax.devices()[:2], TINY))


def test_speed_memory_and_a_profile_are_written(tmp_path, compiled_once):
    items = gpu_speed.items(jax.devices()[:2], tmp_path / "profiles", TINY)
    assert [item.key for item in items] == ["speed/8B, packed, remat selective"]      # no tiles without a GPU
    assert gpu.work(items, record(tmp_path), FOREVER, ()) == gpu.DONE
    assert did(tmp_path) == {items[0].key: RIGHT}
    page = (tmp_path / "gpu-none.md").read_text()
    assert "| `8B, packed, remat selective` | 2 of 2 | 2 × 128 |" in page and "| `all-gather" in page
    assert list((tmp_path / "profiles").rglob("*.xplane.pb"))


def test_a_profile_that_fails_loses_no_time_that_was_measured(tmp_path, monkeypatch, compiled_once):
    def kernels(path, platform):
        raise OSError("no CUPTI")
    monkeypatch.setattr(gpu_speed, "kernels", kernels)
    gpu.work(gpu_speed.items(jax.devices()[:2], tmp_path / "profiles", TINY), record(tmp_path), FOREVER, ())
    page = (tmp_path / "gpu-none.md").read_text()
    assert "| `8B, packed, remat selective` | 2 of 2 | 2 × 128 |" in page and "profile: OSError: no CUPTI" in page


def test_rows_hold_documents_as_long_as_the_roofline_assumes():
    run = gpu_speed.run_of(gpu_speed.PLANS[0], 1, 64)
    packed = gpu_speed.rows(run)
    assert {x.shape for name, x in packed.items()
            if name != "sequence"} == {(64, 8192)} and packed["sequence"].shape == (64,)
    starts = (packed["positions"] == 0).sum() - 64          # a row's own start may be the middle of a document
    assert 64 * 8192 / starts == pytest.approx(2000, rel=.25)     # some 260 of lengths that vary tenfold
    in_whole_rows = next(plan for plan in gpu_speed.PLANS if not plan.packed)
    whole = gpu_speed.rows(gpu_speed.run_of(in_whole_rows, 1, 1))
    assert (whole["segments"] == 1).all() and (whole["positions"] == whole["index"]).all()


def test_tiles_are_timed_and_the_fastest_is_told_beside_those_in_use(monkeypatch):
    small = Tiles(*[Blocks(16, 16, 4, 2)] * 3)
    monkeypatch.setattr(gpu_speed.tiles, "of", lambda width, gpu: small)
    monkeypatch.setattr(tile_timing, "candidates", lambda kernel: [])
    monkeypatch.setattr(tile_timing, "kernels", partial(tile_timing.kernels, interpret=True))
    monkeypatch.setattr(tile_timing, "CALLS", 1)
    found = gpu_speed.timed_tiles(64, "h200", gpu_speed.Sizes(tile_shape=tile_timing.Shape(1, 32, 2, 1, 10)))
    assert found["row"]["in use"] == "the same" and found["row"]["forward + dq + dkv"].endswith(" ms")


def test_typical_rows_are_visited_as_the_roofline_expects():
    expected = attention_pairs.row_share(8192, 2000, 1.5)
    assert abs(gpu_speed.visited(gpu_speed.typical(4, 8192)) / expected - 1) < .05
    assert gpu_speed.visited(np.arange(256)[None] == 0) == 1.5         # three blocks of 128 × 128, of 256 × 256 / 2


def test_blocks_of_experts_kernels_are_timed_beside_those_in_use(monkeypatch, tmp_path):
    made = grouped_tiles.engine
    monkeypatch.setattr(grouped_tiles, "engine", lambda kind, block: made(kind, GroupedBlock(128, 32, 32, 4, 2), True))
    few = {kind: {(128, 64): ((64, 8, 3),)} for kind in grouped_tiles.CANDIDATES}
    monkeypatch.setattr(grouped_tiles, "CANDIDATES", few)
    found = gpu_speed.timed_grouped(grouped_tiles.Shape("tiny", 64, 4, 2, 64, 32), 100, tmp_path)
    assert len(found["lines"]) == 2 + 8 and all(len(times) == 2 for name, times in found["timings"].items()
                                                if name != "dy · down, SwiGLU backward")


needs_gpu_compiler = pytest.mark.skipif(compile.missing_wheels(),
                                        reason=f"pip install -e '.[gpu-compile]': no {compile.missing_wheels()}")


@needs_gpu_compiler
@pytest.mark.long
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("widths", gpu_attention.Sizes().widths)
def test_attention_compiles_for_a_gpu_at_its_full_sizes(widths, causal):
    sizes, at = gpu_attention.Sizes(), jax.sharding.SingleDeviceSharding(compile.topology("h200:1")[0])
    B, T, S = sizes.rows, sizes.queries, sizes.queries if causal else sizes.other_keys
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=at)
    q, o, k, v = (array(gpu_attention.DTYPE, B, *shape, width) for shape in (
        (T, sizes.heads), (S, sizes.kv_heads)) for width in widths)
    given, mask = (q, k, v, array("int32", B, T), array("int32", B, S)), CAUSAL if causal else WHOLE
    for name, make in gpu_attention.engines(widths, "h200", sizes, False).items():
        if name != "cudnn":         # asks for its library
            jax.jit(partial(make().forward, mask=mask)).lower(*given).compile()
            jax.jit(partial(make().backward, mask=mask)).lower(*given, o, array("float32", B, T, sizes.heads),
                                                               o).compile()


@needs_gpu_compiler
@pytest.mark.long
@pytest.mark.parametrize("key", [key for key in EIGHT if key.endswith("bfloat16")])
def test_steps_compile_for_eight_gpus_with_the_attention_kernels(key):
    devices = compile.topology("h100:8")
    run = {item.key: item for item in gpu_steps.items(devices, CPU())}[key].measure.args[0]
    made = assembly.assemble(run, devices)
    assert "meshtrain_attention" in gpu_steps.compiled(made)[0].as_text(), made.notes


@needs_gpu_compiler
@pytest.mark.long
@pytest.mark.parametrize("gpus", ["h200:1", "h100:8"])
@pytest.mark.parametrize("plan", gpu_speed.PLANS, ids=lambda plan: plan.key)
def test_speed_programs_fit_at_first_go_and_xla_recomputes_nothing(plan, gpus):
    devices, gpu_of = compile.topology(gpus), hardware.get(gpus.partition(":")[0])
    layers = gpu_speed.layers_that_fit(gpu_speed.run_of(plan, len(devices), gpu_speed.Sizes().microbatches), devices)
    made, step, _ = gpu_speed.compiled(plan, devices, gpu_speed.Sizes())
    assert made.run.model.num_layers == layers
    held = memory.measure(made, step)["total"]
    # Too little would be another model: half of the memory is used where layers were left out.
    whole = gpu_speed.run_of(plan, len(devices), gpu_speed.Sizes().microbatches).model.num_layers
    assert (.5 if layers < whole else 0) * gpu_of.hbm_bytes < held <= .9 * hardware.usable_bytes(gpu_of)
    seconds = {name: 1.2 * kernel.seconds / len(kernel.instructions)
               for kernel in CompiledProgram.of_run(made, step).roofline.kernels
               for name in kernel.instructions}
    measured = gpu_speed.Measured((1.0, 2.0, 4.0), 3.0, held, seconds | {"nccl": 1e-3}, (11.0, 10.0))
    found = gpu_speed.told(plan, made, step, measured)
    assert found["row"]["step, s"] == "2" and found["row"]["by inspect, GiB"] == found["row"]["peak, GiB"]
    lines = "\n".join(found["lines"])
    assert "| 1.20 |" in lines and "`nccl` | 1.0 |" in lines and "model/layers.py:" in lines
