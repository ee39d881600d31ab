"""Ranks the layouts of a model on GPUs by predicted speed: python -m meshtrain.plan llama3-8b --gpus 64 --gpu h100.

Predicts the step time and memory of every layout that the model and the hosts allow, by closed formulas, and ranks
those that fit. Compiles nothing (except with --verify) and reads no data. MODEL is a preset, a model folder or
hf://org/name on the Hugging Face hub; --model.key value changes it. Exit codes: 0 · 1 with --verify, XLA cannot compile
a program, or it would compute wrong numbers · 2 a mistake in the settings · 3 nothing fits · 75 stopped on request.
"""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import shlex
import time
from collections.abc import Callable

from meshtrain import assembly, config, design, hardware, run_files, teacher
from meshtrain.choices.setting import Setting
from meshtrain.config import ConfigError, Run
from meshtrain.cost.formulas import assumptions, attention_pairs, calibrations, decode, mixers, rates
from meshtrain.cost.formulas.options import Attended, StepOptions
from meshtrain.cost.formulas.place import place
from meshtrain.cost.planner import gap, search
from meshtrain.cost.program import compile as gpu_compile
from meshtrain.inference import cache, placement
from meshtrain.inspection import plans as texts, summary, topologies
from meshtrain.inspection.inspected import Inspected
from meshtrain.model import transformer
from meshtrain.names import AXES, OFFLOAD, REMAT
from meshtrain.pages import plans, skin
from meshtrain.parallel.pipeline.schedules import NAMES
from meshtrain.rl import exchange
from meshtrain.run import command, say
from meshtrain.run.stops import DOES_NOT_FIT, DONE
from meshtrain.sharding import rules
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.shipped import names, rule_file
from meshtrain.storage import model_folder
from meshtrain.training import objective, state

Tell = Callable[[int, int, int], None]
MOST_GPUS = 1 << 17
HUB_NAME = re.compile(r"[\w-]+/[\w.-]+(?<!\.toml)")      # organization/model


def _gpus(text: str) -> list[int]:
    return [config.whole(1, MOST_GPUS)(part) for part in text.split(",")]


def _fix_option(help: str) -> config.Option:
    return config.Option(help, "N", "8", config.whole(1))


COMMAND = config.Command("meshtrain.plan", {
    "gpus": config.Option("number of GPUs; 64,128,256 shows the best plan for each", "N", "64", _gpus, (),
                          required="the best layout depends on it"),
    "gpu": config.Option(f"type of GPU: {', '.join(hardware.list_priced())}", "NAME", "h100",
                         config.one_of(*hardware.list_priced()), required="the best layout depends on it"),
    "seq-len": config.Option("tokens per sequence", "S", "8192", config.whole(1)),
    "global-batch": config.Option("sequences per step (default: about 4 million tokens)", "B", "512", config.whole(1)),
    **{axis: _fix_option(f"fix mesh.{axis}") for axis in AXES},
    "schedule": config.Option("fix the pipeline schedule", "NAME", "1f1b", config.one_of(*NAMES)),
    "chunks": _fix_option("fix the chunks per stage"),
    "microbatches": _fix_option("fix the number of microbatches"),
    "remat": config.Option("fix training.remat", "POLICY", "selective",
                           config.one_of(*REMAT, OFFLOAD)),
    "compute-dtype": config.Option("fix model.compute_dtype", "D", "bfloat16", config.one_of("bfloat16", "float32")),
    "rules": config.Option("also try your own rule file", "FILE", "my_rules.toml", many=True),
    "max-memory": config.Option("memory limit of a GPU", "GiB", "70", config.number("a number of GiB", positive=True)),
    "gpus-per-host": _fix_option("GPUs per host (default: that of the type of GPU)"),
    "tokens": config.Option("print how many days the run trains for these tokens", "T", "1e12",
                            config.number("a number of tokens", positive=True)),
    "budget-hours": config.Option("print how many tokens these GPU hours train", "H", "100000",
                                  config.number("a number of GPU hours", positive=True)),
    "assume": config.Option("change an assumption of the formulas", "NAME=NUMBER", "matmul.best=0.7",
                            assumptions.parse, many=True),
    "json": config.Option("print only JSON"),
    "html": config.Option("also write an HTML page: one file without external resources", "FILE", "plans.html"),
    "write": config.Option("write the best plan as a run file", "RUN.toml", "best.toml"),
    "verify": config.Option("compile the best K plans for these GPUs and compare formulas with programs", "K", "3",
                            config.whole(1), 0),
}, "MODEL|RUN.toml", (0, 1))
TOKENS = 1 << 22            # default tokens per step: 4 million, as in published runs of billions of parameters
MOST_FAULTS = 5
FIRST_S, EVERY_S, LIVE_S = 1.0, 10.0, 0.1       # seconds to the first line of progress, between two lines, and live
TOLD, OTHERS = 20, 400      # plans in the output; further plans that JSON has as points of a plot


@command.entry(COMMAND, __doc__, (gpu_compile.NotCompiledError, assembly.BrokenProgramError))
def main(options: config.Arguments) -> int:
    with config.user_errors():
        for option in ("html", "write"):
            if option in options:
                skin.check_free(f"--{option}", options[option])
    planned = make_plans(options, SearchProgress().tell)
    with config.user_errors():
        if "html" in options:
            skin.write("--html", options["html"], plans.page(planned.as_json()))
        if "write" in options and planned.best:
            skin.write("--write", options["write"], run_file(planned.run, planned.best, options["write"]))
    say.answer(json.dumps(planned.as_json()) if options["json"] else planned.text())
    if "html" in options:
        say.err(f"written: {options['html']}")
    if "write" in options:
        say.err(f"written: {options['write']}" if planned.best else "nothing fits, so nothing is written")
    return DONE if any(answer.plans for _, answer in planned.answers) else DOES_NOT_FIT


@dataclasses.dataclass(frozen=True, eq=False)
class Planned:
    """The result of a command line. answers: for each number of GPUs. compiled: with --verify, from `verify`, for the
    best plans. behind: how much slower the fixed layout is than the best one; None if nothing is fixed. unopened: the
    files of the run that were not read."""
    run: Run
    answers: list[tuple[search.Question, search.Answer]]
    length: texts.Length
    compiled: list[dict]
    behind: gap.Gap | None
    unopened: str

    @property
    def best(self) -> search.Plan | None:
        return next(iter(self.answers[0][1].plans), None)

    @property
    def _notes(self) -> list[str]:
        return [*filter(None, [self.unopened]), *config.note_custom(self.run)]

    def text(self) -> str:
        """Return the text that the command prints."""
        (question, answer), several = self.answers[0], len(self.answers) > 1
        parts = [texts.scaling(self.answers, self.length) if several else
                 texts.page(question, answer, TOLD, self.length, self.behind)]
        if objective.of_run(self.run).samples and not several and answer.plans:
            parts.append(texts.sampling(price_sampling(self.run, question, answer.plans[0])))
        if self.compiled:
            parts.append(texts.verification_table(question, answer.plans, self.compiled))
        parts += [f"note: {note}" for note in self._notes]
        return "\n\n".join(parts)

    def as_json(self) -> dict:
        """Return the output of `--json`: for one number of GPUs the best plans and those that nearly fit, for several
        numbers the best plan for each."""
        (question, answer), several, length = self.answers[0], len(self.answers) > 1, self.length
        of_each = [(q, plan) for q, a in self.answers
                   for plan in (a.plans[:1] if several else [*a.plans[:TOLD], *a.misses])]
        samples = objective.of_run(self.run).samples
        rows = [plan.as_json() | ({"gpus": q.num_gpus} if several else {}) | length.as_json(q, plan)
                | ({"sampling": price_sampling(self.run, q, plan)} if samples else {})
                | ({"compiled": self.compiled[k]} if k < len(self.compiled) else {})
                for k, (q, plan) in enumerate(of_each)]
        others = [] if several else answer.plans[TOLD:][:OTHERS]
        return {"plans": rows, "model": self.run.model.model_dump(), "name": self.run.run.name,
                "num_params": sum(info.size for info in question.rows),
                "gpus": [q.num_gpus for q, _ in self.answers] if several else question.num_gpus,
                "gpu": question.rated.gpu.name, "usable_bytes": question.usable_bytes,
                "seq_len": question.options.seq_len, "global_batch": question.options.global_batch,
                "tried": sum(a.tried for _, a in self.answers),
                "attention": texts.first_attention(question, answer).engine,
                "behind": self.behind and self.behind.as_json(),
                "first": None if several else texts.first(question, answer, self.behind),
                "others": [{"mesh": dict(plan.sizes), "rules": plan.rules.path, "step_time_s": plan.price.step_s,
                            "memory_bytes": plan.price.memory_bytes["total"]} for plan in others],
                "caveats": [*texts.caveats(question, answer), *self._notes],
                "assumed": question.rated.assumed.as_dict(formula=True),
                "reasons": question.rated.assumed.reasons(formula=True), "median_error": assumptions.MEDIAN_ERROR}


class SearchProgress:
    """Shows how far a search is: on a terminal in one live line, otherwise on stderr, after a second and then every
    EVERY_S."""

    def __init__(self) -> None:
        self.next_at = time.monotonic() + FIRST_S

    def tell(self, num_gpus: int, done: int, count: int) -> None:
        """Show that `done` of `count` combinations of mesh and rule file are done. A call that is not due does
        nothing."""
        live, now = say.is_live(), time.monotonic()
        if now < self.next_at and not (live and done == 0):
            return
        self.next_at = now + (LIVE_S if live else EVERY_S)
        line = f"pricing layouts of {num_gpus:,} GPUs: {done:,} of {count:,} meshes with a rule file"
        say.live(line, passing=True) if live else say.err(line)


def make_plans(options: config.Arguments, tell: Tell = lambda num_gpus, done, count: None) -> Planned:
    """Return the plans for a command line. tell: as `SearchProgress.tell`. Raises: ConfigError if no layout is allowed,
    or options contradict each other."""
    if alone := [option for option in ("write", "verify") if option in options and len(options["gpus"]) > 1]:
        raise ConfigError(f"--{alone[0]} is for one number of GPUs; give a single number with --gpus")
    run = run_of(options)
    answers = [answer_for(run, options, count, tell) for count in options["gpus"]]
    question, answer = answers[0]
    free = search.search(dataclasses.replace(question, fixed={}), functools.partial(tell, question.num_gpus)) if (
        question.fixed and answer.plans) else None
    return Planned(run, answers, texts.Length(options["tokens"], options["budget-hours"]),
                   [verify(run, question, plan) for plan in answer.plans[:options["verify"]]],
                   gap.of(question, answer.plans[0], free) if free else None,
                   summary.note_unopened(run) if options.names[0].endswith(".toml") else "")


def answer_for(run: Run, options: config.Arguments, num_gpus: int, tell: Tell
               ) -> tuple[search.Question, search.Answer]:
    """Search the layouts for one number of GPUs, and return (question, answer). Raises: ConfigError if no layout is
    allowed."""
    question = question_of(run, options, num_gpus)
    answer = search.search(question, functools.partial(tell, num_gpus))
    if not answer.plans and not answer.misses:
        fixed = " ".join(f"--{axis} {options[axis]}" for axis in AXES if axis in options)
        none = (f"{fixed}: no mesh of {num_gpus} GPUs has these sizes; their product must divide the "
                f"number of GPUs, and the model's numbers of heads and layers must allow them")
        refused = [f"{fault} (so {number} of {answer.laid} meshes with a rule file)"
                   for fault, number in answer.faults.most_common(MOST_FAULTS)]
        raise ConfigError(*(refused or [none]))
    return question, answer


# ---- the command line ------------------------------------------------------------------------------------------------


def run_of(options: config.Arguments) -> Run:
    """Return the run to plan for, without a layout. Raises: ConfigError."""
    given = {"training.microbatches": 1, "pipeline.schedule": "auto", "pipeline.chunks": 1, "mesh.simulated_devices": 0,
             "mesh.full_devices": 0}
    given |= {f"mesh.{axis}": 1 for axis in AXES} | {"sharding.rules": "sharding_rules/ddp.toml"}
    if not options.names:
        raise ConfigError(f"the model is missing; give a run file or a model: {', '.join(run_files.presets())}")
    (name,) = options.names
    if "compute-dtype" in options:
        given["model.compute_dtype"] = options["compute-dtype"]
    preset = name in run_files.presets() and not os.path.exists(name)
    with config.user_errors():
        folder = not preset and not name.endswith(".toml") and model_folder.is_at(name)
    if preset or folder:
        stem = name.rstrip("/").rpartition("/")[2]
        given |= {"checkpoint.init_from" if folder else "model.preset": name,
                  "run.name": f"{stem}-{options['gpus'][0]}-{options['gpu']}",
                  "run.sample_tokens": 0, "run.sample_prompt": "",
                  "data.source": "text", "data.paths": '["data/*.txt"]',
                  "training.steps": 10000, "optimizer.name": "adamw", "optimizer.learning_rate": 3e-4,
                  "optimizer.warmup_steps": 1000,
                  "validation.every": 500, "data.global_batch": 1, "checkpoint.every": 500}
        given.setdefault("model.compute_dtype", "bfloat16")
    elif not os.path.exists(name) and HUB_NAME.fullmatch(name):
        raise ConfigError(f"{name} is not a run file; for the model with this name on the Hugging Face hub, give "
                          f"hf://{name}")
    elif not os.path.exists(name) and "." not in name:
        raise ConfigError(f"{name} is neither a run file nor a model; models: {', '.join(run_files.presets())}")
    if "seq-len" in options:
        given["data.seq_len"] = options["seq-len"]
    elif preset or folder:
        given["data.seq_len"] = 2048 if name.startswith("gpt") else 4096 if name.startswith("llama2") else 8192
    if "global-batch" in options:
        given["data.global_batch"] = options["global-batch"]
    run = run_files.load([*([] if preset or folder else [name]), *options.keys], settings=given)
    batch_is_given = "global-batch" in options or any("data.global_batch" in word for word in options.keys)
    if (preset or folder) and not batch_is_given:
        batch = max(1, TOKENS // run.data.seq_len, max(options["gpus"]) // 8)
        together = math.lcm(*options["gpus"])
        even = together & -together
        odd = together // even                  # e.g. 3 for 96 GPUs, 125 for 1,000
        while even > 1 and odd * even > batch:
            even //= 2
        batch = max(1, round(batch / (odd * even))) * odd * even
        run = run.replace(data={"global_batch": batch})
    return run


# ---- from a run to a question and back -------------------------------------------------------------------------------


def question_of(run: Run, options: config.Arguments, num_gpus: int) -> search.Question:
    """Return the search question for one number of GPUs. Raises: ConfigError."""
    with config.user_errors():
        gpu = hardware.get(options["gpu"])
        if count := options["gpus-per-host"]:
            rack = gpu.gpus_per_link_domain > gpu.gpus_per_host
            gpu = dataclasses.replace(gpu, gpus_per_host=count,
                                      gpus_per_link_domain=gpu.gpus_per_link_domain if rack else count)
        usable = hardware.usable_bytes(gpu)
        rated = rates.Rates(gpu, assumptions.Assumptions(gpu.name, dict(options["assume"])))
        paths = [*options["rules"], *(f"sharding_rules/{stem}.toml"
                                      for stem in sorted(names("sharding_rules"), key=len))]
        rule_files = tuple(dataclasses.replace(rules.load(rule_file(path)), path=path) for path in paths)
    if not run.model.num_experts:
        rule_files = tuple(loaded for loaded in rule_files if "expert" not in loaded.tables["params"])
    if run.model.matmul_dtype == "float8" and hardware.lacks_float8(gpu):
        raise ConfigError(f'model.matmul_dtype="float8": {gpu.name} has no float8 matmuls; use '
                          f'model.matmul_dtype="auto", or e.g. --gpu h100')
    if "max-memory" in options:
        usable = int(options["max-memory"] * 2**30)
    with config.user_errors():
        model = transformer.of_run(run)
        unpriced = mixers.find_unpriced(run.model)
    if unpriced:
        named = [f'model.custom.{letter}="{getattr(run.model.custom, letter)}"' for letter in unpriced]
        raise ConfigError(*(f"{mixer} has no price, so the formulas cannot predict memory and time; give its class "
                            f"an attribute `price`, a MixerCost, or compile one layout with meshtrain.inspect"
                          for mixer in named))

    files = {loaded.path: str(rule_file(loaded.path)) for loaded in rule_files}
    apart = {path: config.problems(run.replace(sharding={"rules": file}), config.APART_FROM_LAYOUT)
             for path, file in files.items()}

    def check(asked: Run, sizes, loaded: rules.Rules):
        faults = config.problems(asked, config.OF_LAYOUT) + apart[loaded.path]
        laid = design.lay_out(asked, sizes, loaded, model)
        if not faults + laid.faults:
            faults = design.engine_faults(Setting(laid.layout, "gpu", gpu, installed=False, run=asked), model)
            if taught and not faults:
                faults = design.check_teacher(asked.replace(mesh=sizes, sharding={"rules": files[loaded.path]}),
                                              "gpu", gpu, taught)
        return laid.layout, faults or laid.faults

    tried = run.replace(pipeline={"schedule": "1f1b"}, training={
        "remat": options["remat"] or "none", "microbatches": options["microbatches"] or 1})

    def lay(sizes, loaded: rules.Rules, method: str):
        return check(tried.replace(mesh=sizes, context={"method": method}), sizes, loaded)

    def faults_of(plan: search.Plan) -> list[str]:
        return check(with_layout(run, plan), plan.sizes, plan.rules)[1]

    def rate_attention(layout: rules.Layout, method: str) -> Attended:
        return attention_pairs.count(run.replace(context={"method": method}), layout, rated.assumed)
    fixed = {name: options[name] for name in search.FIXABLE if name in options}
    held = state.optimizer_bytes(model, run.optimizer, run.training.steps, run.training.ema > 0)
    priced = design.price_teacher(run, rated.assumed)
    taught = transformer.of_run(design.teacher_run(run)) if run.distill.teacher else None
    options_of_run = StepOptions.of(run, gpu.name, teacher=priced, **held)
    return search.Question(run.model, model.parameters(), num_gpus, options_of_run, rated, usable, rule_files, fixed,
                           rate_attention, lay, faults_of)


def with_layout(run: Run, plan: search.Plan) -> Run:
    """Return the run with a plan's layout."""
    options, pipelined, split = plan.options, plan.sizes["stage"] > 1, plan.sizes["context"] > 1
    return run.replace(
        mesh={**plan.sizes, "placement": tuple(plan.placed.mesh.placement)}, sharding={"rules": plan.rules.path},
        context={"method": options.method if split else "ring"},
        training={"microbatches": options.microbatches, "remat": options.remat},
        pipeline={"schedule": options.schedule if pipelined else "auto", "chunks": options.chunks})


def verify(run: Run, question: search.Question, plan: search.Plan) -> dict:
    """Compile a plan's program. Return its costs per GPU and step: memory_bytes, traffic_bytes (sent, by mesh axes) and
    step_time_s (by the roofline).

    Raises: ConfigError if this machine cannot compile for these GPUs, gpu_compile.NotCompiledError,
    assembly.BrokenProgramError.
    """
    gpu, given = question.rated.gpu, question.rated.assumed.given
    run = with_layout(run, plan).replace(sharding={"rules": str(rule_file(plan.rules.path))})
    made = assembly.assemble(run, topologies.find_devices(run, f"{gpu.name}:{question.num_gpus}"))
    with gpu_compile.naming_faults("a plan's step"):
        executable, of_teacher = assembly.compile_step(made, made.program.lower_step()), teacher.compile_alone(made)
    step = Inspected(made, executable,
                     {name: value for name, value in given.items() if not assumptions.TABLE[name].formula},
                     teacher=of_teacher)
    sent: dict[str, int] = {}
    for row in step.program.audit.collectives:
        axes = "+".join(row.axes)
        sent[axes] = sent.get(axes, 0) + row.bytes
    return {"memory_bytes": step.memory_bytes, "traffic_bytes": sent, "step_time_s": step.step_s}


def price_sampler(run: Run, question: search.Question) -> dict:
    """Return the costs of a separate sampler (rl.lag) on the GPUs of one host, with the keys of `price_sampling` and
    others. weights_bytes: bytes per GPU. file_bytes: bytes of each version of the weights, which goes through the file
    system."""
    rl, model, gpus = run.rl, transformer.of_run(run), question.rated.gpu.gpus_per_host
    for tensor in (n for n in range(gpus, 0, -1) if gpus % n == 0):
        sizes = {axis: {"tensor": tensor, "data": gpus // tensor}.get(axis, 1) for axis in AXES}
        with contextlib.suppress(ValueError):
            read = placement.command(model, sizes)
            break
    room, shards = cache.round_room(run.data.seq_len), gpus // tensor
    placed = place(question.rows, run.model, read, MeshSpec(sizes))
    asked = exchange.prompts_of_part(rl) * rl.samples
    costs = decode.Sampling(placed, read, -(-asked // shards) * shards, room,
                            functools.partial(cache.places, room=room))
    held = sum(map(costs.read_bytes, question.rows))
    fits = costs.fitting((1 - calibrations.SAMPLER_SPARE) * question.usable_bytes - held)
    token_s = sum(costs.token_s(question.rated, room).values())
    return {"gpus": gpus, "tensor": tensor, "slots": costs.slots, "slots_that_fit": fits, "weights_bytes": round(held),
            "cache_bytes": round(costs.cache_bytes), "token_s": token_s,
            "file_bytes": round(sum(info.size * costs.itemsize(info) for info in question.rows if info.trainable)),
            "tokens_per_s_per_gpu": costs.slots / token_s / gpus,
            "batch_s_at_most": -(-rl.prompts * rl.samples // asked) * rl.max_tokens * token_s}


def price_sampling(run: Run, question: search.Question, plan: search.Plan) -> dict:
    """Return the costs of sampling in a run with [rl] under a plan: times in seconds, bytes per GPU, and slots of
    data.seq_len tokens. Raises: ConfigError if rl.rules cannot be read."""
    if run.rl.lag:
        return price_sampler(run, question)
    rl, model, layout = run.rl, transformer.of_run(run), plan.placed.layout
    with config.user_errors():
        given = rules.load(rule_file(rl.rules)) if rl.rules else None
    read = placement.beside(model, layout, given)
    room, shards = cache.round_room(run.data.seq_len), read.num_shards(read.batch_axes)
    placed = place(question.rows, run.model, read, plan.placed.mesh)
    asked = rl.slots or rl.prompts * rl.samples
    costs = decode.Sampling(placed, layout, -(-asked // shards) * shards, room,
                            functools.partial(cache.places, room=room))
    state = plan.price.memory_bytes["params"] + plan.price.memory_bytes["optimizer"]
    fits = costs.fitting_beside(state, question.usable_bytes)
    if not rl.slots and 0 < fits < costs.slots:
        costs = dataclasses.replace(costs, slots=fits)
    token_s = sum(costs.token_s(question.rated, room).values())
    return {"slots": costs.slots, "slots_that_fit": fits, "weights_bytes": round(costs.copy_bytes()),
            "cache_bytes": round(costs.cache_bytes), "sync_s": costs.sync_s(question.rated), "token_s": token_s,
            "tokens_per_s_per_gpu": costs.slots / token_s / question.num_gpus,
            "batch_s_at_most": -(-rl.prompts * rl.samples // costs.slots) * rl.max_tokens * token_s}


def run_file(run: Run, plan: search.Plan, path: str) -> str:
    """Return the text of a plan's run file, with the model's settings written out. path: where it will be written."""
    _, *lines = config.dump(with_layout(run, plan)).splitlines()
    return "\n".join([f"# python -m meshtrain.train {shlex.quote(path)}", *lines]) + "\n"
