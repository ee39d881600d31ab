"""Orders a compiled step by the roofline's seconds: XLA compiles it again with a profile of its own instructions.

XLA's latency-hiding scheduler starts a collective so early that it takes it for hidden. Its own estimates are poor for
groups of many hosts and for kernels that it does not know. Given a profile (profile-guided latency estimation, PGLE) it
takes the seconds from there; kernels and collectives stay the same, in another order.

Source: openxla/xla, xla/service/profile_guided_latency_estimator.h; docs of JAX, "Profile guided latency estimation".
"""
from __future__ import annotations

from meshtrain import hardware
from meshtrain.cost.program import roofline

WAITING = 0.02      # share of a step that waits for links, from which on compiling again is worth its time
WAITING_S = 0.005   # the same, seconds of a step


def profile(made, executable) -> str:
    """XLA's ProfiledInstructionsProto, as text, of an assembled run's compiled step; "" where too little of the step
    waits for links, or the GPUs are none that programs can be compiled for here."""
    gpu = roofline.gpu_of(made)
    if gpu is None or not gpu.can_be_compiled_for or made.mesh.size == 1:
        return ""
    text = executable.as_text()
    line = roofline.of_run(made, text)
    if line.exposed_s < max(WAITING * line.step_s, WAITING_S):
        return ""
    return "".join(f'costs {{ name: "{name}" cost_us: {1e6 * seconds:.3f} }}\n'
                   for name, seconds in sorted(roofline.seconds_of_each(made, text).items()))


def is_better(made, executable, other) -> bool:
    """Whether the step is shorter in `executable` than in `other`, by the roofline, and needs no memory that a GPU does
    not have."""
    step_s, others_s = (roofline.of_run(made, each.as_text()).step_s for each in (executable, other))
    held, others = map(_bytes, (executable, other))
    return step_s < others_s and held <= max(others, hardware.usable_bytes(roofline.gpu_of(made)))


def _bytes(executable) -> int:
    found = executable.memory_analysis()
    return (found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
            + found.temp_size_in_bytes)
