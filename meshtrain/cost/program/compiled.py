"""A compiled program on a mesh, and the costs that are read from it, each computed once. Knows no rule file."""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cached_property

import jax

from meshtrain import hardware
from meshtrain.cost.formulas import flops
from meshtrain.cost.formulas.assumptions import Assumptions
from meshtrain.cost.formulas.rates import Rates
from meshtrain.cost.program import audit as audits, roofline as rooflines
from meshtrain.cost.program.audit import ProgramAudit
from meshtrain.cost.program.roofline import Roofline, Workload


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledProgram:
    """A compiled program with lazily computed properties. Its mesh has any axes.

    assumed: values that replace assumptions of the roofline, by name. Raises: ValueError, from `prices`, for unknown
    assumptions.
    """
    executable: jax.stages.Compiled
    mesh: jax.sharding.Mesh
    workload: Workload
    assumed: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @classmethod
    def of_run(cls, made, executable: jax.stages.Compiled, assumed: Mapping[str, float] | None = None
               ) -> CompiledProgram:
        """Return the compiled step of an assembled run."""
        run = made.run
        tokens = run.data.global_batch * run.data.seq_len
        model_flops = tokens * flops.model_flops_per_token(made.model.parameters(), run.model, run.data.seq_len)
        workload = Workload(tokens, model_flops, run.model.compute_dtype, run.data.document_mask, run.context.method)
        return cls(executable, made.mesh, workload, assumed or {})

    @cached_property
    def text(self) -> str:
        """The optimized HLO as text; tens of MB for a large program."""
        return self.executable.as_text()

    @cached_property
    def audit(self) -> ProgramAudit:
        return audits.read(self.text, self.mesh)

    @cached_property
    def num_recomputed(self) -> int:
        """The number of values that XLA recomputes to stay below its memory limit."""
        return audits.count_recomputed(self.text)

    @cached_property
    def gpu(self) -> hardware.Gpu | None:
        """The GPU of the mesh; None unless its speed is known."""
        return rooflines.gpu_of(self.mesh)

    @property
    def for_gpus(self) -> bool:
        return self.mesh.devices.flat[0].platform != "cpu"

    @cached_property
    def memory_bytes(self) -> dict[str, int]:
        """Bytes that one device holds: arguments, outputs that reuse no argument, temporaries, total."""
        memory = self.executable.memory_analysis()
        held = {"arguments": memory.argument_size_in_bytes,
                "outputs": memory.output_size_in_bytes - memory.alias_size_in_bytes,
                "temporaries": memory.temp_size_in_bytes}
        return held | {"total": sum(held.values())}

    @property
    def usable_bytes(self) -> int | None:
        """The memory of a GPU that a process may use; None without a GPU of known speed."""
        return hardware.usable_bytes(self.gpu) if self.gpu else None

    def fits(self, total_bytes: int | None) -> bool:
        """Return False if this many bytes are known not to fit into a device's memory, else True."""
        return self.usable_bytes is None or total_bytes is None or total_bytes <= self.usable_bytes

    @cached_property
    def prices(self) -> Rates | None:
        """The rates of the roofline; None without a GPU of known speed."""
        return Rates(self.gpu, Assumptions(self.gpu.name, self.assumed)) if self.gpu else None

    @cached_property
    def roofline(self) -> Roofline | None:
        """The roofline of the program; None without a GPU of known speed."""
        return rooflines.read(self.text, self.mesh, self.prices, self.workload) if self.prices else None

    def instruction_seconds(self) -> dict[str, float]:
        """Return `roofline.instruction_seconds`. The GPU's speed must be known."""
        assert self.prices is not None
        return rooflines.instruction_seconds(self.text, self.mesh, self.prices, self.workload)
