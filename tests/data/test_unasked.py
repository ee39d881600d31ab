"""What a compiled step does that its layout does not ask for is told with the tensor's name."""
import os

import jax
import pytest

from meshtrain import assembly
from meshtrain.cost.program.audit import Collective, ProgramAudit
from meshtrain.inspection import unexpected
from meshtrain.run import say
from test_layouts import run_of

LOGGED = ("W1122 13:40:22.733081   31297 spmd_partitioner.cc:656] [SPMD] Involuntary full rematerialization. The "
          "compiler cannot go from sharding {devices=[2,1,4]<=[8]} to {devices=[1,8,1]<=[2,4]T(1,0)} efficiently for "
          "HLO operation %sin.0 = f32[32,16,4]{2,1,0} sine(%sharding_constraint.0), sharding={devices=[2,1,4]<=[8]}, "
          "metadata={op_name=\"jit(f)/mlp/sin\" stack_frame_id=4}. As the last resort, SPMD will replicate the tensor "
          "and then partition it to obtain the target sharding")


@pytest.fixture(scope="module")
def made():
    """Of rules: a run of them, put together and not compiled."""
    return lambda rule, **mesh: assembly.assemble(run_of(rule, mesh), jax.devices())


def program(*rows: Collective) -> ProgramAudit:
    return ProgramAudit(rows, (), (), (), ())


def gather(dims, axes=("fsdp",), trips=4, kind="all-gather") -> Collective:
    return Collective(kind, axes, 1000, 1000, "bf16", "sharding_constraint", trips, 8, False, (dims,))


UP = 64, 96         # of the MLP of a layer


def test_weights_gathered_in_a_loop_that_their_rule_keeps_whole_are_named(made):
    (line,) = unexpected.warnings(made("zero1", fsdp=8), program(gather(UP)), [])
    assert line.startswith("layers/mlp/gate/kernel or layers/mlp/up/kernel is all-gathered over fsdp 4 times a step "
                           "inside a loop, 1000 B: ")
    assert "[params] of" in line and "zero1.toml" in line


@pytest.mark.parametrize("rule, mesh, row", [
    ("zero3", dict(fsdp=8), gather(UP)),                            # as its rule says
    ("zero1", dict(fsdp=8), gather(UP, trips=1)),                   # once a step: new weights
    ("zero1", dict(fsdp=8), gather((64,))),                         # a norm's scale
    ("zero1", dict(fsdp=8), gather((4, 32, 64))),                   # no parameter has this shape
    ("zero1", dict(fsdp=8), gather(UP, kind="reduce-scatter")),     # gradients
    ("ddp", dict(data=4, tensor=2), gather((64, 64), axes=("tensor",)))],     # what products read
    ids=["zero3", "once", "norm", "activation", "gradient", "tensor"])
def test_what_a_layout_asks_for_is_no_warning(rule, mesh, row, made):
    assert unexpected.warnings(made(rule, **mesh), program(row), []) == []


def test_what_xla_replicates_to_reshard_is_told_once_with_its_name(made):
    one = made("zero3", fsdp=8)
    again = [LOGGED, LOGGED.replace("13:40", "13:41")]      # of a step that was compiled twice
    (line,) = unexpected.warnings(one, program(), [*again, LOGGED.replace("%sin.0", "%sin.1"),
                                                   "W1122 13:40:22.733081 1 other.cc:1] something else"])
    assert line.startswith("XLA replicates f32[32,16,4] of mlp/sin on every device to change its sharding from "
                           "{devices=[2,1,4]<=[8]} to")
    assert "2 times in the program" in line
    assert "of layers/mlp/gate/kernel, layers/mlp/up/kernel on every device" in unexpected.warnings(
        one, program(), [LOGGED.replace("f32[32,16,4]", "f32[64,96]")])[0]


def test_what_xla_warns_of_is_kept_and_all_else_is_passed_on(capfd):
    kept: list[str] = []
    with say.without_noise(kept):
        os.write(2, f"{LOGGED}\nE1122 13:40:22.733081 1 broken.cc:1] an error\n".encode())
    assert [line.rstrip("\n") for line in kept] == [LOGGED]
    assert capfd.readouterr().err == "E1122 13:40:22.733081 1 broken.cc:1] an error\n"
