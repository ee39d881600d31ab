"""The search's promises: no allowed layout beats its best plan, whoever draws it, and what more devices cost never
rises."""
import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sampling
from meshtrain import assembly, run_files
from meshtrain.commands import plan
from meshtrain.cost.formulas import footprint
from meshtrain.cost.formulas.options import Options
from meshtrain.cost.formulas.place import place
from meshtrain.cost.planner import search
from meshtrain.cost.formulas.price import price
from meshtrain.cost.program import compile
from meshtrain.names import AXES
from meshtrain.parallel.pipeline import schedules
from meshtrain.sharding.mesh import MeshSpec
from test_price import priced

REGRET = 1.05               # the price of the best plan over that of any other allowed layout
MOST = 16                   # chunks of a stage


def question(words: str) -> search.Question:
    options = plan.COMMAND.read(words.split())
    return plan.question_of(plan.run_of(options), options, *options["gpus"])


def divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def schedule_of(p: int, m: int) -> list[tuple[str, int]]:
    """Every schedule and number of chunks that m microbatches on p stages allow."""
    return [("", 1)] if p == 1 else [
        (name, v) for name in schedules.NAMES for v in (range(2, MOST + 1) if name in schedules.INTERLEAVED else (1,))
        if not schedules.problems(name, p, m, v)]


class Allowed:
    """The layouts of a question, known by nothing but the checks of `train`; those that hold too much are None."""

    def __init__(self, asked: search.Question):
        self.asked, self.layouts = asked, {}

    def layout(self, sizes: dict, rules, method: str):
        key = tuple(sizes.values()), rules.path, method
        if key not in self.layouts:
            layout, wrong = self.asked.lay(sizes, rules, method)
            num_shards = layout.num_shards(layout.mesh_axes("activations", "batch"))
            self.layouts[key] = None if wrong or self.asked.options.global_batch % num_shards else (layout, num_shards)
        return self.layouts[key]

    def price(self, layout, mesh: MeshSpec, m: int, remat: str, name: str, chunks: int, method: str):
        asked, attended = self.asked, self.asked.attended(layout, method)
        options = Options(asked.options.seq_len, asked.options.global_batch, m, remat, name, chunks,
                          method, attended, asked.options.loss_chunk,
                          asked.options.optimizer_bytes)
        placed = place(asked.rows, asked.cfg, layout, mesh)
        if footprint.memory(placed, options)["total"] > asked.usable_bytes:
            return None
        return price(placed, asked.rated, options)

    def drawn(self, draw: random.Random):
        """One at random: rule file, sizes of the axes that it names, method, placement, microbatches, remat, schedule,
        chunks."""
        asked = self.asked
        rules = draw.choice(asked.rule_files)
        named = sorted({axis for table in rules.tables.values() for on in table.values() for axis in on})
        sizes, rest = dict.fromkeys(AXES, 1), asked.num_gpus
        *others, last = draw.sample(named, len(named))
        for axis in others:
            sizes[axis] = draw.choice(divisors(rest))
            rest //= sizes[axis]
        sizes[last], method = rest, draw.choice(search.METHODS)
        found = sizes["stage"] <= asked.cfg.num_layers and self.layout(sizes, rules, method)
        if not found:
            return None
        layout, num_shards = found
        m = draw.choice(divisors(asked.options.global_batch // num_shards))
        kinds = schedule_of(sizes["stage"], m)
        return kinds and self.price(layout, MeshSpec(sizes, draw.sample(AXES, len(AXES))), m, draw.choice(search.REMAT),
                                    *draw.choice(kinds), method)

    def all(self) -> list[tuple]:
        """What `price` takes, for each; axes placed as by default."""
        asked, found = self.asked, []
        for sizes in itertools.product(*[divisors(asked.num_gpus)] * len(AXES)):
            sizes = dict(zip(AXES, sizes))
            if math.prod(sizes.values()) != asked.num_gpus or sizes["stage"] > asked.cfg.num_layers:
                continue
            methods = search.METHODS if sizes["context"] > 1 else search.METHODS[:1]
            for rules, method in itertools.product(asked.rule_files, methods):
                if laid := self.layout(sizes, rules, method):
                    for m in divisors(asked.options.global_batch // laid[1]):
                        found += [(laid[0], MeshSpec(sizes), m, remat, *kind, method) for remat, kind in
                                  itertools.product(search.REMAT, schedule_of(sizes["stage"], m))]
        return found


# ---- the best is the best --------------------------------------------------------------------------------------------


LARGE = ["llama3-70b --gpus 64 --gpu h100 --global-batch 256",
         "llama3-8b --gpus 32 --gpu h100 --global-batch 128 --seq-len 32768",
         "llama3-8b --gpus 96 --gpu h100 --global-batch 480", "gpt-180b --gpus 128 --gpu h100 --global-batch 512",
         "llama3-70b --gpus 64 --gpu a100-80gb --global-batch 128",
         "llama2-7b --gpus 64 --gpu a100-40gb --global-batch 192",
         "llama3-70b --gpus 64 --gpu h100 --global-batch 32 --seq-len 131072",
         "llama3-70b --gpus 144 --gpu gb200 --global-batch 288",
         "llama3-8b --gpus 64 --gpu b200 --global-batch 100 --assume nic.share=0.1",
         "llama3-405b --gpus 1024 --gpu h100 --global-batch 1024"]


@pytest.mark.parametrize("words, most", [
    (LARGE[0], 300), *(pytest.param(words, 200, marks=sampling.GRID) for words in LARGE[1:-1]),
    *(pytest.param(words, 1000, marks=pytest.mark.long) for words in LARGE)])
def test_the_best_plan_loses_to_none_of_many_layouts_drawn_at_random(words, most):
    asked = question(words)
    best, allowed, draw = search.search(asked).plans[0], Allowed(asked), random.Random(words)
    found, tries = [], 0
    while len(found) < most and (tries := tries + 1) < 30 * most:
        if one := allowed.drawn(draw):
            found.append(one.step_s)
    assert len(found) >= most / 10 and best.price.step_s <= REGRET * min(found)


SMALL = ["llama3-8b --gpus 8 --gpu h100 --global-batch 12",
         "llama3-8b --gpus 8 --gpu a100-40gb --global-batch 24", "llama3-8b --gpus 8 --gpu h100 --global-batch 64",
         "llama3-8b --gpus 12 --gpu h100 --global-batch 60",
         "llama3.2-1b --gpus 8 --gpu h100 --global-batch 40 --seq-len 32768",
         "llama3-8b --gpus 16 --gpu h100 --global-batch 16 --seq-len 131072",
         "llama3-70b --gpus 32 --gpu h200 --global-batch 32"]


# All of them are 40,000 to 300,000 layouts, 2 ms each.
@pytest.mark.parametrize("words, most", [
    ("llama3-8b --gpus 8 --gpu h100 --global-batch 3", None),
    *(pytest.param(words, 2000, marks=sampling.GRID) for words in SMALL),
    *(pytest.param(words, None, marks=pytest.mark.long) for words in SMALL)])
def test_the_best_plan_loses_to_none_of_all_layouts_that_are_allowed(words, most):
    asked = question(words)
    allowed = Allowed(asked)
    layouts = allowed.all()
    chosen = sampling.generator(words).sample(layouts, most) if most else layouts
    found = [one.step_s for one in itertools.starmap(allowed.price, chosen) if one]
    assert len(found) > 20 and search.search(asked).plans[0].price.step_s <= REGRET * min(found)


def test_a_search_that_leaves_out_the_chunks_is_found_out(monkeypatch):
    """With one chunk a stage, layouts that are allowed beat the best plan."""
    monkeypatch.setattr(search, "MOST_CHUNKS", 1)
    words = "llama3-70b --gpus 64 --gpu a100-80gb --global-batch 48"
    narrow = search.search(question(words)).plans[0]
    monkeypatch.undo()
    assert narrow.price.step_s > search.search(question(words)).plans[0].price.step_s      # schedules are kept by question


# ---- what every plan keeps -------------------------------------------------------------------------------------------


@settings(max_examples=8)
@given(gpus=st.sampled_from([1, 2, 6, 8, 24, 40, 64, 256, 1000]), batch=st.sampled_from([7, 48, 256, 1000]),
       gpu=st.sampled_from(["h100", "a100-40gb", "gb200"]),
       preset=st.sampled_from(["llama3.2-1b", "llama3-8b", "llama3-70b"]))
def test_meshes_multiply_to_the_gpus_and_plans_that_fit_fit(gpus, batch, gpu, preset):
    asked = question(f"{preset} --gpus {gpus} --gpu {gpu} --global-batch {batch}")
    answer = search.search(asked)
    for one in answer.plans + answer.misses:
        assert math.prod(one.sizes.values()) == gpus == one.placed.mesh.num_devices
        assert one.fits == (one.price.memory_bytes["total"] <= asked.usable_bytes) and bool(one.reason) >= (
            not one.fits)
        replicas = one.placed.layout.num_shards(one.placed.layout.mesh_axes("activations", "batch"))
        assert batch % (replicas * one.options.microbatches) == 0
    assert [one.price.step_s for one in answer.plans] == sorted(one.price.step_s for one in answer.plans)


SHARDED = {"zero1": ("data", "fsdp"), "zero2": ("data", "fsdp"), "zero3": ("data", "fsdp"), "hsdp": ("fsdp",),
           "tensor": ("tensor",), "ddp": ("tensor",), "hsdp_zero1": ("data", "fsdp")}
SHARDED |= {"zero3 with tensor and context": ("data", "fsdp", "tensor", "context"),
            "zero1 with context": ("fsdp", "context"),
            "ddp in stages": ("stage",), "zero2 in stages": ("fsdp", "tensor", "stage")}


@settings(max_examples=30)
@given(data=st.data(), rule=st.sampled_from(sorted(SHARDED)), remat=st.sampled_from(search.REMAT))
def test_more_devices_on_an_axis_never_raise_the_bytes_that_it_shards(data, rule, remat):
    """States by kind; and activations where the axis splits tokens, heads or widths: of stages the schedule keeps
    them. From one device to two, stages bring a schedule and context an attention that remat does not repeat."""
    axis = data.draw(st.sampled_from(SHARDED[rule]))
    mesh = {other: data.draw(st.sampled_from([1, 2])) for other in SHARDED[rule] if other != axis}
    n = data.draw(st.sampled_from([1, 2, 4]))
    staged, rule = "in stages" in rule, rule.partition(" ")[0]
    mesh |= {"stage": mesh.get("stage", 2)} if staged and axis != "stage" else {}
    n *= 1 + (axis in ("stage", "context") and n == 1)
    options = Options(8192, 256, 8, remat, "1f1b" if staged else "")
    few, many = (priced(rule, mesh | {axis: num_shards}, options).memory_bytes for num_shards in (n, 2 * n))
    for kind in ("params", "grads", "optimizer", *(("activations",) if axis != "stage" else ())):
        assert many[kind] <= few[kind], (mesh, axis, kind)


@pytest.mark.long
@pytest.mark.skipif(compile.missing_wheels(), reason=f"pip install -e '.[gpu-compile]': no {compile.missing_wheels()}")
@pytest.mark.parametrize("number", range(4))
def test_a_plan_taken_at_random_compiles(number, tmp_path):
    """Of a small model: what is compiled does not grow with its sizes."""
    words = ("configs/quickstart.toml --gpus 16 --gpu h100 --compute-dtype bfloat16 --global-batch 64 --seq-len 2048 "
             "--model.num_layers 4 --model.num_heads 8 --model.num_kv_heads 8 --model.head_dim 64 "
             "--model.embed_dim 512")
    options = plan.COMMAND.read(words.split())
    run = plan.run_of(options)
    asked = plan.question_of(run, options, 16)
    one = sampling.generator(f"a plan {number}").choice(search.search(asked).plans)
    (tmp_path / "run.toml").write_text(plan.run_file(run, one, "run.toml"))
    made = assembly.assemble(run_files.load([str(tmp_path / "run.toml")]), compile.topology("h100:16"))
    assert assembly.compile_step(made, made.program.lower_step()).memory_analysis().temp_size_in_bytes > 0
