"""The comparison of `meshtrain.parity`, and where the shipped rule files lie."""
from meshtrain.parity.compare import (  # noqa: F401
    BFLOAT16, FLOAT32, Compiled, Tolerance, assemble, batch_of, check, check_accepted, check_equal, check_leaves,
    compile_run, draw_parameters, evaluate, first_moment, on_one_device, one_device, train,
)  # fmt: skip
from meshtrain.shipped import locate_shipped

RULES = locate_shipped("sharding_rules")
