"""The teacher of a run with training.objective = "distill" beside the compiled step: its memory, time and FLOPs."""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cached_property

import jax

from meshtrain import design, hardware
from meshtrain.assembly import Assembly
from meshtrain.cost.formulas import assumptions, flops, forward, traffic
from meshtrain.cost.program import audit
from meshtrain.cost.program.compiled import CompiledProgram
from meshtrain.cost.program.roofline import Roofline, Workload, gpu_of
from meshtrain.inspection import fitting, formula_vs_compiled


def flops_per_token(made: Assembly) -> float:
    """Return the FLOPs that a token of a step needs: the model's, and those of the forward of a teacher."""
    run, teacher = made.run, design.price_teacher(made.run, assumptions.Assumptions(""))
    return flops.model_flops_per_token(made.model.parameters(), run.model, run.data.seq_len) + (
        teacher.flops_per_token if teacher else 0.0)


@dataclasses.dataclass(frozen=True, eq=False)
class TeacherForward:
    """The teacher of a run. executable: its compiled forward; None if only formulas give its costs. assumed: see
    `CompiledProgram`."""
    made: Assembly
    executable: jax.stages.Compiled | None
    assumed: Mapping[str, float]

    @cached_property
    def cost(self) -> forward.TeacherCost:
        """The costs by the formulas; the time is that of an H100 if the speed of the GPUs is unknown."""
        gpu = gpu_of(self.made.mesh)
        options = fitting.options_of(self.made, gpu, fitting.rates_of(gpu or hardware.get("h100")))
        assert options.teacher
        return options.teacher.beside(self.made.placed, options)

    @cached_property
    def program(self) -> CompiledProgram | None:
        data, cfg, cost = self.made.run.data, self.cost.placed.cfg, self.cost
        tokens = data.global_batch * data.seq_len
        work = Workload(tokens, tokens * cost.teacher.flops_per_token, cfg.compute_dtype, data.document_mask,
                        cost.options.method)
        return CompiledProgram(self.executable, self.made.mesh, work, self.assumed) if self.executable else None

    @property
    def memory_bytes(self) -> dict[str, int]:
        """The bytes of `TeacherCost.memory_bytes`, with the temporaries of the compiled forward if there is one."""
        if not self.program:
            return self.cost.memory_bytes
        return self.cost.memory_bytes | {"temporaries": self.program.memory_bytes["temporaries"]}

    def with_step(self, line: Roofline | None) -> dict[str, float] | None:
        """Return time, tokens/s and MFU of a step and the forward before it, by the rooflines. line: the roofline of
        the step."""
        own = self.program and self.program.roofline
        if not line or not own:
            return None
        step_s = line.step_s + own.step_s
        return {"step_time_s": step_s, "tokens_per_s": line.workload.tokens / step_s,
                "mfu": (line.mfu * line.step_s + own.mfu * own.step_s) / step_s}

    @cached_property
    def formulas(self) -> formula_vs_compiled.Formulas:
        cost = self.cost
        return formula_vs_compiled.Formulas(cost.memory_bytes, traffic.summarize(
            cost.collectives, self.made.mesh_spec.sizes), round(cost.matmul_flops))

    def as_json(self, line: Roofline | None) -> dict:
        """Return the entry "teacher" of `inspect --json`. line: the roofline of the step."""
        program, cost, gpu = self.program, self.cost, gpu_of(self.made.mesh)
        own = program and program.roofline
        return {"folder": self.made.run.distill.teacher, "rules": cost.placed.layout.rules.path,
                "num_params": sum(info.size for info in cost.placed.rows),
                "memory_bytes": {"formula": cost.memory_bytes, "compiled": self.memory_bytes if program else None},
                "collectives": {"formula": self.formulas.collectives,
                                "compiled": program and audit.summarize(program.audit.collectives)},
                "matmul_flops": {"formula": self.formulas.matmul_flops,
                                 "compiled": program and formula_vs_compiled.matmul_flops(program.audit)},
                "time_s": {"formula": cost.seconds(fitting.rates_of(gpu)) if gpu else None,
                           "compiled": own.step_s if own else None},
                "with_step": self.with_step(line)}
