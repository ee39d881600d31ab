"""The comparison of `meshtrain.parity`, and where the shipped rule files lie."""
import jax
import numpy as np

from meshtrain import assembly, config
from meshtrain.parity.compare import (  # noqa: F401
    FLOAT32, Compiled, Tolerance, allow_reduction, batch_of, check_accepted, compile_run, differences,
    draw_parameters, leaf_differences, num_devices, on_one_device, one_device, train,
)  # fmt: skip
from meshtrain.shipped import locate_shipped

RULES = locate_shipped("sharding_rules")
# bfloat16: activations have 8 bits, and other shards round other values. Small leaves hold mostly rounding errors. Some
# tokens are routed to other experts.
BFLOAT16 = Tolerance(2e-3, 2e-2, 0.15, 1e-2, 0.05, 0.3)


def assemble(run: config.Run) -> assembly.Assembly:
    return assembly.assemble(run, jax.devices()[:num_devices(run)])


def check(run: config.Run, seed: int = 0, tolerance: Tolerance = FLOAT32) -> Compiled:
    """Compile the run's step and compare it with that of one device. Raises: AssertionError if they differ."""
    case = compile_run(run)
    check_equal(case, seed, tolerance)
    return case


def check_equal(case: Compiled, seed: int = 0, tolerance: Tolerance = FLOAT32) -> None:
    """Compare losses, gradient norms and optimizer state with those of one device. Raises: AssertionError if they
    differ, or if a permute leaves a device without data."""
    assert not case.audit.broken_permutes
    tolerance = allow_reduction(tolerance, case.made.layout)
    assert (wrong := differences(case, seed, tolerance.floor).beyond(tolerance)) == [], "; ".join(wrong)


def evaluate(run: config.Run, seed: int = 0) -> np.ndarray:
    """Evaluate a batch. Return an array [2]: the sum of the loss, and the number of targets."""
    made = assemble(run)
    params = jax.device_put(draw_parameters(made, seed), made.program.step.state.sharding.params)
    with jax.default_matmul_precision("highest"), jax.set_mesh(made.mesh):
        rows = {name: x for name, x in batch_of(run, 0).items() if name in made.program.step.rows}
        return np.array(jax.device_get(made.program.evaluate(params, made.program.place(rows))))


def first_moment(opt_state):
    """Return AdamW's first moment, which after one step is (1 - b1) times the clipped gradient."""
    (moment,) = [s.mu for s in jax.tree.leaves(opt_state, is_leaf=lambda s: hasattr(s, "mu")) if hasattr(s, "mu")]
    return moment


def check_leaves(found, expected, tolerance: Tolerance = FLOAT32) -> None:
    """Compare two pytrees with the tolerance's `state` and `floor`."""
    for path, off in leaf_differences(found, expected, tolerance.floor).items():
        assert off <= tolerance.state, f"{path}: {off:.1e}"
