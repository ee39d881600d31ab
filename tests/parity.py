"""The comparison of `meshtrain.parity`, and where the shipped rule files lie."""
from meshtrain.parity.compare import (  # noqa: F401
    BFLOAT16, FLOAT32, Compiled, Tolerance, accepted, assembled, batch_of, check, check_equal, check_leaves, compiled,
    drawn_parameters, evaluated, first_moment, on_one_device, one_device, trained,
)  # fmt: skip
from meshtrain.shipped import shipped

RULES = shipped("sharding_rules")
