"""A compiled training step and the costs read from it, each computed once; for `inspect`, `train`, `plan --verify`."""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property

import jax

from meshtrain import hardware
from meshtrain.assembly import Assembly
from meshtrain.cost.formulas.decode import Sampling
from meshtrain.cost.program import audit, roofline
from meshtrain.cost.program.audit import ProgramAudit
from meshtrain.cost.program.roofline import Roofline
from meshtrain.inspection import formula_vs_compiled, memory, unexpected
from meshtrain.inspection.formula_vs_compiled import Formulas
from meshtrain.inspection.sampling import SamplingCosts


@dataclasses.dataclass(frozen=True, eq=False)
class Inspected:
    """A compiled step with lazily computed properties.

    assumed: values that replace assumptions of the roofline, by name. logged: XLA's log lines from the compilation.
    sampling: for a run with [rl], (costs, compiled programs), see `SamplingCosts`. Raises: ValueError, from `roofline`,
    for unknown assumptions.
    """
    made: Assembly
    executable: jax.stages.Compiled
    assumed: Mapping[str, float] = dataclasses.field(default_factory=dict)
    logged: Sequence[str] = ()
    sampling: tuple[Sampling, Mapping[str, jax.stages.Compiled]] | None = None

    @cached_property
    def text(self) -> str:
        """The optimized HLO as text; tens of MB for a large program."""
        return self.executable.as_text()

    @cached_property
    def program(self) -> ProgramAudit:
        return audit.read(self.text, self.made.mesh)

    @cached_property
    def memory_bytes(self) -> dict[str, int | None]:
        """Bytes that one device holds, by kind; None where the program does not tell."""
        return memory.measure(self.made, self.executable, self.text)

    @property
    def fits(self) -> bool:
        """False if the step is known not to fit into a device's memory, else True."""
        gpu, total = roofline.gpu_of(self.made), self.memory_bytes["total"]
        return gpu is None or total is None or total <= hardware.usable_bytes(gpu)

    @cached_property
    def formulas(self) -> Formulas | None:
        """The costs by the formulas; None if they do not cover the model."""
        return formula_vs_compiled.of(self.made, memory.formula(self.made))

    @cached_property
    def roofline(self) -> Roofline | None:
        """The roofline of the step; None unless it is compiled for a GPU of known speed."""
        return roofline.of_run(self.made, self.text, self.assumed)

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
        return unexpected.warnings(self.made, self.program, self.logged)

    @cached_property
    def differences(self) -> list[str]:
        """Lines about differences from the formulas; empty unless the step is compiled for GPUs."""
        if self.formulas is None or not self.for_gpus:
            return []
        return formula_vs_compiled.differences(self.made, self.formulas, self.memory_bytes, self.program)

    @property
    def for_gpus(self) -> bool:
        return self.made.mesh.devices.flat[0].platform != "cpu"
