"""Simulated devices in several processes: no collective can start beside another of its group, or Gloo pairs the two.

Read from the compiled program: XLA's CPU backend orders the collectives of one computation, but what follows a loop may
start while the loop runs unless it reads what the loop makes.
"""
import dataclasses

import jax
import jax.numpy as jnp
import parity
import pytest
import steps
from test_layouts import run_of

from meshtrain import assembly, trained
from meshtrain.inference.generate import GenerationLimits
from meshtrain.training import accumulate

@pytest.fixture
def by_gloo(monkeypatch):
    for module in (accumulate, trained):
        monkeypatch.setattr(module, "by_gloo", lambda mesh: True)


def order_checked(executable, devices: int):
    assert steps.meeting(executable.as_text(), devices) == []
    return executable


def test_evaluation_and_sample_of_several_processes_have_one_order(by_gloo):
    made = assembly.assemble(run_of("zero3", dict(data=2, fsdp=2, tensor=2)), jax.devices())
    program = made.program
    params = program.step.state.abstract.params
    devices = made.mesh.size
    assert steps.meeting(program.compile_function(program.evaluate, params, program.step.batch).as_text(), devices) == []
    with jax.set_mesh(made.mesh):
        placed = trained.wrap(made, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype, device=a.sharding), params))
        names = []
        generator = placed.generator()
        compiled = lambda name, jitted, *args: names.append(name) or order_checked(
            generator.compiled(name, jitted, *args), devices)
        dataclasses.replace(generator, compiled=compiled).complete([[5]], GenerationLimits(3))
    assert len(names) == 3


def test_without_the_order_the_head_meets_the_layers():
    """What the reading above is worth: the same step as one process compiles it."""
    case = parity.compile_run(run_of("zero3", dict(fsdp=8)))
    assert steps.meeting(case.step.as_text(), case.made.mesh.size)


def test_what_is_behind_a_loop_and_reads_nothing_of_it_is_found():
    text = """HloModule m
%body (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %ar = f32[4]{0} all-reduce(%p), replica_groups={{0,1},{2,3}}, to_apply=%add
}
ENTRY %main (x: f32[4], y: f32[4]) -> (f32[4], f32[4]) {
  %x = f32[4]{0} parameter(0)
  %y = f32[4]{0} parameter(1)
  %loop = f32[4]{0} while(%x), condition=%c, body=%body
  %late = f32[4]{0} all-reduce(OPERAND), replica_groups=GROUPS, to_apply=%add
  ROOT %out = (f32[4]{0}, f32[4]{0}) tuple(%loop, %late)
}
"""
    text = lambda operand, groups, text=text: text.replace("OPERAND", operand).replace("GROUPS", groups)
    assert steps.meeting(text("%y", "{{0,1},{2,3}}"), 4) == ["main: loop and late"]
    assert not steps.meeting(text("%loop", "{{0,1},{2,3}}"), 4)
    assert not steps.meeting(text("%y", "{{0,2},{1,3}}"), 4), "other groups do not meet"
