"""A run's compiled training step, compared with the formulas and rules; for `inspect`, `train`, `plan --verify`."""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property

import jax

from meshtrain.assembly import Assembly
from meshtrain.cost.formulas.decode import Sampling
from meshtrain.cost.program.compiled import CompiledProgram
from meshtrain.inspection import formula_vs_compiled, memory, unexpected
from meshtrain.inspection.formula_vs_compiled import Formulas
from meshtrain.inspection.sampling import SamplingCosts
from meshtrain.inspection.teacher_forward import TeacherForward


@dataclasses.dataclass(frozen=True, eq=False)
class Inspected:
    """A compiled step with lazily computed properties.

    assumed: see `CompiledProgram`. logged: XLA's log lines from the compilation. sampling: for a run with [rl], (costs,
    compiled programs), see `SamplingCosts`. teacher: the compiled forward of a teacher; None: formulas give its costs.
    """
    made: Assembly
    executable: jax.stages.Compiled
    assumed: Mapping[str, float] = dataclasses.field(default_factory=dict)
    logged: Sequence[str] = ()
    sampling: tuple[Sampling, Mapping[str, jax.stages.Compiled]] | None = None
    teacher: jax.stages.Compiled | None = None

    @cached_property
    def program(self) -> CompiledProgram:
        return CompiledProgram.of_run(self.made, self.executable, self.assumed)

    @cached_property
    def memory_bytes(self) -> dict[str, int | None]:
        """Bytes that one device holds, by kind; None where the program does not tell."""
        held, forward = memory.measure(self.made, self.executable, self.program.text), self.teacher_forward
        return forward.cost.add(held, forward.memory_bytes, with_batch=True) if forward else held

    @cached_property
    def teacher_forward(self) -> TeacherForward | None:
        """The teacher of the run; None without one."""
        return TeacherForward(self.made, self.teacher, self.assumed) if self.made.run.distill.teacher else None

    @property
    def step_s(self) -> float | None:
        """The time of a step by the roofline, with that of a teacher; None without a GPU of known speed."""
        line = self.program.roofline
        both = self.teacher_forward and self.teacher_forward.with_step(line)
        return both["step_time_s"] if both else line.step_s if line else None

    @property
    def fits(self) -> bool:
        """False if the step is known not to fit into a device's memory, else True."""
        return self.program.fits(self.memory_bytes["total"])

    @cached_property
    def formulas(self) -> Formulas | None:
        """The costs by the formulas; None if they do not cover the model."""
        formulas = formula_vs_compiled.of(self.made, memory.formula(self.made))
        if formulas is None or not self.teacher_forward:
            return formulas
        return dataclasses.replace(formulas, memory_bytes=self.teacher_forward.cost.add(dict(formulas.memory_bytes)))

    @cached_property
    def sampling_costs(self) -> dict | None:
        """The costs of sampling, from `SamplingCosts.as_json`; None without [rl]."""
        if self.sampling is None:
            return None
        total = self.memory_bytes["total"]
        assert total is not None
        return SamplingCosts(self.made, *self.sampling, total, self.assumed).as_json()

    @cached_property
    def warnings(self) -> list[str]:
        return unexpected.warnings(self.made, self.program.audit, self.logged)

    @cached_property
    def differences(self) -> list[str]:
        """Lines about differences from the formulas; empty unless the step is compiled for GPUs."""
        if self.formulas is None or not self.program.for_gpus:
            return []
        return formula_vs_compiled.differences(self.made, self.formulas, self.memory_bytes, self.program.audit)
