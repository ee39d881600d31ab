"""Gives XLA a profile of instruction times from the roofline, so that a second compilation overlaps collectives better.

XLA's latency-hiding scheduler starts each collective early enough to hide it, by its own estimates of the times of
collectives and kernels. These estimates are poor for groups that span hosts and for kernels that XLA does not know.
With a profile (profile-guided latency estimation, PGLE) XLA uses the profile's times. Kernels and collectives stay the
same; only their order changes.

Source: openxla/xla, xla/service/profile_guided_latency_estimator.h; docs of JAX, "Profile guided latency estimation".
"""
from __future__ import annotations

from meshtrain.cost.program.compiled import CompiledProgram

# A step is compiled again if at least this much of it waits for links: a share, and seconds. By the roofline another
# order hides a third to two thirds of that. No GPU has confirmed it, so less is not worth a second compilation.
WAITING, WAITING_S = 0.09, 0.005


def profile(program: CompiledProgram) -> str:
    """Return the profile of a compiled step (XLA's ProfiledInstructionsProto, as text).

    The profile is empty if the step waits too little for links. It is also empty on GPUs that `inspect --topology`
    cannot compile for, because no test has priced their programs.
    """
    if program.gpu is None or not program.gpu.can_be_compiled_for or program.mesh.size == 1:
        return ""
    line = program.roofline
    assert line is not None
    if line.exposed_s < max(WAITING * line.step_s, WAITING_S):
        return ""
    return "".join(f'costs {{ name: "{name}" cost_us: {1e6 * seconds:.3f} }}\n'
                   for name, seconds in sorted(program.instruction_seconds().items()))


def is_better(program: CompiledProgram, other: CompiledProgram) -> bool:
    """Whether `program` takes less time for the step than `other` by the roofline. It must also fit into a GPU's
    memory, or need no more memory than `other`."""
    line, others_line = program.roofline, other.roofline
    assert line is not None and others_line is not None
    total, others_total = program.memory_bytes["total"], other.memory_bytes["total"]
    return line.step_s < others_line.step_s and (total <= others_total or program.fits(total))
