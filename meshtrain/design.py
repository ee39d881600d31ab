"""Makes the choices that a run leaves open, on a mesh and before anything is compiled; rejects invalid runs."""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax

from meshtrain import config, hardware, own_code
from meshtrain.choices import attention, engines, experts, recurrence, stages
from meshtrain.choices.setting import Choice, Refusal, Setting
from meshtrain.config import ConfigError, Run
from meshtrain.config.sections import Distill, Experts, Lora, Model, Optimizer
from meshtrain.cost.formulas import assumptions, attention_pairs, flops, footprint, forward, price, rates, simulate
from meshtrain.cost.formulas.options import Attended, Options, StepOptions
from meshtrain.cost.formulas.place import place
from meshtrain.cost.formulas.placed import Placed
from meshtrain.huggingface import folder
from meshtrain.inference import placement
from meshtrain.model import transformer
from meshtrain.model.execution import Engines
from meshtrain.names import AXES
from meshtrain.parallel.pipeline.schedules import Schedule
from meshtrain.sharding import rules, unmet
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.sharding.rules import Layout, Rules, Tensor
from meshtrain.shipped import rule_file
from meshtrain.storage import model_folder
from meshtrain.training import groups, objective, state


@dataclasses.dataclass(frozen=True, eq=False)
class Design:
    """A checked run with everything that was chosen for it. Needs no devices.

    choice: the pipeline's schedule; None without stages. notes: printed once for the user.
    """
    run: Run
    mesh_spec: MeshSpec
    layout: Layout
    model: transformer.Transformer
    engines: Engines
    choice: simulate.ChosenSchedule | None
    notes: tuple[str, ...]

    @functools.cached_property
    def placed(self) -> Placed:
        """The run's weights and layout as input of the cost formulas."""
        return place(self.model.parameters(), self.run.model, self.layout, self.mesh_spec)


def make(run: Run, mesh_spec: MeshSpec, platform: str, gpu: hardware.Gpu | None,
         device: jax.Device | None = None) -> Design:
    """Check the layout and make the choices that the run leaves open. They are the same in all processes and restarts.

    platform, gpu: as in `Place`. device: one of the devices; None if they are only named. Raises: ConfigError with
    every fault of mesh and rules.
    """
    sizes = mesh_spec.sizes
    with config.user_errors():
        loaded = rules.load(run.sharding.rules)
        if faults := engines.find_float8_faults(run, platform, gpu, device):
            raise ConfigError(*faults)
        model = transformer.of_run(run)
        own_code.check(run, model, loaded)
        grouped = describe_groups(run, model)
    laid = lay_out(run, sizes, loaded, model)
    if laid.faults:
        raise ConfigError(*laid.faults)
    try:
        chosen = choose_engines(Setting(laid.layout, platform, gpu, run=run), model)
    except Refusal as refusal:
        raise ConfigError(*refusal.faults) from None
    choice = _choose_schedule(run, mesh_spec, model, laid.layout, gpu) if sizes["stage"] > 1 else None
    notes = [*chosen.why]
    if choice:
        notes += [f"pipeline: {choice.why}", *stages.costs(run, choice.schedule)]
    notes += laid.notes
    if run.optimizer.offload and platform == "cpu":
        notes.append("optimizer.offload=true: CPU devices have no memory of their own, so moments count as theirs")
    for axis, section in (("stage", run.pipeline), ("context", run.context)):
        if sizes[axis] == 1 and section != type(section)():
            notes.append(f"mesh.{axis}=1: [{type(section).__name__.lower()}] is not used")
    return Design(run, mesh_spec, laid.layout, model, chosen.value, choice, (*notes, *grouped, *config.notes(run)))


def describe_groups(run: Run, model: transformer.Transformer) -> list[str]:
    """Return a line for each group of optimizer.groups. Raises: ValueError for invalid groups."""
    return groups.describe(run.optimizer, [info for info in model.parameters() if info.trainable], run.model)


def refusals(run: Run, platform: str, gpu: hardware.Gpu | None, model: transformer.Transformer | None = None
             ) -> list[str]:
    """Return the reasons why the program refuses this run; empty if it accepts the run. No mesh axis may be -1.

    Runs the checks of loading a run file, then the checks of `make` except those of installed packages. Raises:
    ConfigError for files that cannot be read. model: the run's model, if it has been built.
    """
    if faults := config.problems(run):
        return faults
    with config.user_errors():
        loaded, model = rules.load(run.sharding.rules), model or transformer.of_run(run)
        describe_groups(run, model)
    laid = lay_out(run, {axis: getattr(run.mesh, axis) for axis in AXES}, loaded, model)
    return laid.faults or engine_faults(Setting(laid.layout, platform, gpu, installed=False, run=run), model)


# ---- the layout ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class LaidOut:
    """The layout that rules give on a mesh, lines about it for the user, and the reasons for refusing it."""
    layout: Layout
    notes: list[str]
    faults: list[str]


def lay_out(run: Run, sizes: Mapping[str, int], loaded: Rules, model: transformer.Transformer) -> LaidOut:
    """Fit the rules to a mesh of these sizes and check them. The run must have passed `config.problems`."""
    staged = stages.choose(run, loaded, sizes, transformer.pad_vocab(run.model))
    fitted, shared = model.fit(staged.value, sizes)
    layout = Layout(fitted, sizes)
    # Checks of context parallelism come first: a length that follows only the rules' remedy might be refused again.
    # Stages have their own checks, so the rules are checked with stage 1.
    faults = engines.find_mixer_faults(run, layout)
    faults += attention.problems(run, layout) + recurrence.problems(run, layout) + experts.problems(run, layout)
    faults = faults or stages.problems(run, loaded, sizes) + rules.problems(
        fitted, {**sizes, "stage": 1}, tensors(run, model, layout), config.SIZE_KEYS)
    faults += unmet.find_unmet_names(loaded, model.tensors)
    idle, partly = rules.unsplit(Layout(loaded, sizes), model.products())
    if not objective.of_run(run).pipelined and sizes["stage"] > 1:
        faults = [f'mesh.stage={sizes["stage"]}: pipelines do not support training.objective='
                  f'"{run.training.objective}"; use mesh.stage=1', *faults]
    return LaidOut(layout, [*staged.why, *shared, *partly], faults + idle)


def tensors(run: Run, model: transformer.Transformer, layout: Layout) -> list[Tensor]:
    """Return every tensor that the rules shard, with its full shape: parameters in three rule tables, and activations.
    """
    return [*model.tensors,
            *model.activations(run.data.global_batch // run.training.microbatches, run.data.seq_len, layout)]


# ---- engines ---------------------------------------------------------------------------------------------------------


def choose_engines(setting: Setting, model: transformer.Transformer) -> Choice[Engines]:
    """Choose the engines of a layout without faults. Raises: Refusal with the faults of engines and of the sampler."""
    faults = _sampler_faults(setting, model)
    try:
        chosen = engines.choose(setting)
    except Refusal as refusal:
        raise Refusal(*refusal.faults, *faults) from None
    if faults:
        raise Refusal(*faults)
    return chosen


def engine_faults(setting: Setting, model: transformer.Transformer) -> list[str]:
    """Return the reasons why `choose_engines` refuses this setting; empty if it accepts the setting."""
    try:
        choose_engines(setting, model)
    except Refusal as refusal:
        return refusal.faults
    return []


def _sampler_faults(setting: Setting, model: transformer.Transformer) -> list[str]:
    """Return the reasons why the sampler on the run's own devices does not support the layout; empty if it does, or if
    there is no sampler."""
    run = setting.run
    if not objective.of_run(run).samples or run.rl.lag:
        return []
    try:
        given = rules.load(rule_file(run.rl.rules), "rl.rules") if run.rl.rules else None
        return experts.problems(run, placement.beside(model, setting.layout, given))
    except ValueError as error:
        return str(error).splitlines()


# ---- the teacher -----------------------------------------------------------------------------------------------------


def teacher_run(run: Run) -> Run:
    """Return the run with its teacher as the model, for a forward. Raises: ValueError from the folder and the rules."""
    rules_of_run = run.sharding.rules
    if run.distill.rules:
        rules_of_run = str(rule_file(run.distill.rules))
        rules.load(rules_of_run, "distill.rules")
    keys, own = folder.settings_of(model_folder.local_path(run.distill.teacher)), run.model
    engines = {key: getattr(own, key) for key in ("attention", "mlp")}
    made = run.model_copy(update={
        "model": Model(**keys, **engines, param_dtype=own.compute_dtype, compute_dtype=own.compute_dtype),
        "optimizer": Optimizer(), "lora": Lora(), "experts": Experts(), "distill": Distill()})
    return made.replace(training={"objective": "next_token", "ema": 0.0, "mtp_weight": 0.0}, checkpoint={
        "init_from": run.distill.teacher, "step": 0, "init_optimizer": False}, sharding={"rules": rules_of_run})


def check_teacher(run: Run, platform: str, gpu: hardware.Gpu | None, model: transformer.Transformer | None = None
                  ) -> list[str]:
    """Return the reasons why the program refuses the teacher of this run; empty without a teacher. The arguments are
    those of `refusals`. Raises: as `teacher_run`."""
    return [f"distill.teacher: {fault}" for fault in refusals(teacher_run(run), platform, gpu, model)
            ] if run.distill.teacher else []


def price_teacher(run: Run, assumed: assumptions.Assumptions) -> forward.TeacherModel | None:
    """Return the teacher of a run as input of the formulas; None without one. Raises: ConfigError."""
    if not run.distill.teacher:
        return None
    with config.user_errors():
        taught = teacher_run(run)
    model = transformer.of_run(taught)
    rows = [dataclasses.replace(info, trainable=False) for info in model.parameters()]

    @functools.lru_cache(8)     # one layout is priced with several numbers of microbatches
    def place_on(layout: Layout, method: str) -> tuple[Placed, Attended]:
        loaded = rules.load(taught.sharding.rules if run.distill.rules else rule_file(layout.rules.path))
        own = Layout(model.fit(loaded, layout.sizes)[0], layout.sizes)
        return (place(rows, taught.model, own, MeshSpec(layout.sizes)),
                attention_pairs.count(taught.replace(context={"method": method}), own, assumed))
    return forward.TeacherModel(place_on, run.distill.top_tokens,
                           flops.model_flops_per_token(model.parameters(), taught.model, run.data.seq_len) / 3)


# ---- the schedule ----------------------------------------------------------------------------------------------------


def _choose_schedule(run: Run, mesh_spec: MeshSpec, model: transformer.Transformer,
                     layout: Layout, gpu: hardware.Gpu | None) -> simulate.ChosenSchedule:
    placed = place(model.parameters(), run.model, layout, mesh_spec)
    held = state.optimizer_bytes(model, run.optimizer, run.training.steps, run.training.ema > 0)

    def bytes_of(schedule: Schedule) -> simulate.StepBytes:
        options = StepOptions.of(run, gpu.name if gpu else "", schedule=schedule.name, chunks=schedule.num_chunks,
                                 **held)
        return simulate.StepBytes(round(footprint.slot_bytes(placed, options)),
                                  footprint.memory(placed, options)["total"])
    usable_bytes = hardware.usable_bytes(gpu) if gpu and gpu.hbm_bytes else None
    return simulate.of_run(run, _stage_costs(run, placed, gpu), mesh_spec.sizes["stage"], bytes_of, usable_bytes)


def _stage_costs(run: Run, placed: Placed, gpu: hardware.Gpu | None) -> Callable[[Schedule], simulate.Costs]:
    """Return a function from a schedule to the costs of a stage's ops. assumption: if the devices' speed is unknown,
    ops have the relative costs of an H100, and memory-bound ops and links cost nothing."""
    known = gpu is not None and gpu.hbm_bytes_per_s is not None
    priced = gpu if gpu is not None and known else hardware.get("h100")
    rated = rates.Rates(priced, assumptions.Assumptions(priced.name))
    attended = attention_pairs.count(run, placed.layout, rated.assumed)

    def costs_of(schedule: Schedule) -> simulate.Costs:
        options = Options.of(run, priced.name, schedule=schedule.name if known else "", chunks=schedule.num_chunks,
                             attended=attended)
        costs = price.stage_costs(placed, rated, options)
        return costs if known else dataclasses.replace(costs, link_s=0.0)
    return costs_of
