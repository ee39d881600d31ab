"""Gives XLA a profile of instruction times from the roofline, so that a second compilation overlaps collectives better.

XLA's latency-hiding scheduler starts each collective early enough to hide it, by its own estimates of the times of
collectives and kernels. These estimates are poor for groups that span hosts and for kernels that XLA does not know.
With a profile (profile-guided latency estimation, PGLE) XLA uses the profile's times. Kernels and collectives stay the
same; only their order changes.

Source: openxla/xla, xla/service/profile_guided_latency_estimator.h; docs of JAX, "Profile guided latency estimation".
"""
from __future__ import annotations

from meshtrain import hardware
from meshtrain.cost.program import roofline

# A step is compiled again if at least this much of it waits for links: a share, and seconds. By the roofline another
# order hides a third to two thirds of that. No GPU has confirmed it, so less is not worth a second compilation.
WAITING, WAITING_S = 0.09, 0.005


def profile(made, executable) -> str:
    """Return the profile of an assembled run's compiled step (XLA's ProfiledInstructionsProto, as text).

    The profile is empty if the step waits too little for links. It is also empty on GPUs that `inspect --topology`
    cannot compile for, because no test has priced their programs.
    """
    gpu = roofline.gpu_of(made)
    if gpu is None or not gpu.can_be_compiled_for or made.mesh.size == 1:
        return ""
    text = executable.as_text()
    line = roofline.of_run(made, text)
    assert line is not None
    if line.exposed_s < max(WAITING * line.step_s, WAITING_S):
        return ""
    return "".join(f'costs {{ name: "{name}" cost_us: {1e6 * seconds:.3f} }}\n'
                   for name, seconds in sorted(roofline.instruction_seconds(made, text).items()))


def is_better(made, executable, other) -> bool:
    """Whether `executable` takes less time for the step than `other` by the roofline. It must also fit into a GPU's
    memory, or need no more memory than `other`."""
    gpu, lines = roofline.gpu_of(made), [roofline.of_run(made, each.as_text()) for each in (executable, other)]
    line, others_line = lines
    assert gpu is not None and line is not None and others_line is not None
    held, others = map(_bytes, (executable, other))
    return line.step_s < others_line.step_s and held <= max(others, hardware.usable_bytes(gpu))


def _bytes(executable) -> int:
    memory = executable.memory_analysis()
    return (memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes)
