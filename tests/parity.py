"""The comparison of `meshtrain.parity`, and where the shipped rule files lie."""
from meshtrain.parity.compare import (  # noqa: F401
    BFLOAT16, FLOAT32, Compiled, Tolerance, assemble, batch_of, check, check_accepted, check_equal, compile_run,
    draw_parameters, evaluate, first_moment, leaf_differences, on_one_device, one_device, train,
)  # fmt: skip
from meshtrain.shipped import locate_shipped

RULES = locate_shipped("sharding_rules")


def check_leaves(found, expected, tolerance: Tolerance = FLOAT32) -> None:
    """Compare two pytrees with the tolerance's `state` and `floor`."""
    for path, off in leaf_differences(found, expected, tolerance.floor).items():
        assert off <= tolerance.state, f"{path}: {off:.1e}"
