"""Simulated devices in several processes: no collective can start beside another of its group, or Gloo pairs the two.

Read from the compiled program: XLA's CPU backend orders the collectives of one computation, but what follows a loop may
start while the loop runs unless it reads what the loop makes.
"""
import dataclasses
import functools

import jax
import jax.numpy as jnp
import parity
import pytest
import sampling
from test_layouts import GRID, LAYOUTS, run_of

from meshtrain import assembly, trained
from meshtrain.cost.program import audit, hlo
from meshtrain.inference.generate import GenerationLimits
from meshtrain.training import accumulate

CONTEXT = [("zero3", dict(data=2, context=4)), ("zero3", dict(fsdp=2, tensor=2, context=2))]
CELLS = LAYOUTS[-1:] + [pytest.param(*cell, marks=sampling.GRID) for cell in LAYOUTS[:-1] + GRID + CONTEXT]
EVERYONE = frozenset()      # permutes of all devices share one group


def unordered(text: str, num_devices: int) -> list[str]:
    """Pairs of a loop (or branch) and a collective, or another loop, of one computation, neither of which waits for the
    other, though both hold a collective of the same devices."""
    module = hlo.parse(text)

    def own(ins) -> set:
        kind = ins.op.removesuffix("-start")
        if kind == "collective-permute":
            return {EVERYONE}
        if kind not in audit.KINDS:
            return set()
        groups = audit.replica_groups(ins.attrs, num_devices)
        return {frozenset(map(frozenset, groups.tolist()))} if groups.shape[1] > 1 else set()

    @functools.cache
    def held(name: str) -> frozenset:
        return frozenset().union(*(own(ins) | inside(ins) for ins in module.computations[name].values()))

    def inside(ins) -> set:
        return set().union(*(held(name) for name in ins.called if name in module.computations))

    found = []
    for name, scope in module.computations.items():
        before: dict[str, frozenset] = {}
        for ins in scope.values():      # operands stand before what reads them
            before[ins.name] = frozenset(ins.operands).union(*(before.get(operand, ()) for operand in ins.operands))
        holders = [(ins, own(ins) | inside(ins)) for ins in scope.values() if own(ins) | inside(ins)]
        for i, (a, groups_a) in enumerate(holders):
            for b, groups_b in holders[i + 1:]:
                loops = inside(a) or inside(b)
                if loops and groups_a & groups_b and a.name not in before[b.name] and b.name not in before[a.name]:
                    found.append(f"{name}: {a.name} and {b.name}")
    return found


@pytest.fixture
def by_gloo(monkeypatch):
    for module in (accumulate, trained):
        monkeypatch.setattr(module, "by_gloo", lambda mesh: True)


@pytest.mark.parametrize("rule, mesh", CELLS)
def test_a_step_of_several_processes_has_one_order_and_equals_one_device(rule, mesh, by_gloo):
    case = parity.check(run_of(rule, mesh))
    assert unordered(case.step.as_text(), case.made.mesh.size) == []


def order_checked(executable, devices: int):
    assert unordered(executable.as_text(), devices) == []
    return executable


@pytest.mark.parametrize("rule, mesh", LAYOUTS[-1:])
def test_so_have_the_evaluation_and_the_sample(rule, mesh, by_gloo):
    made = assembly.assemble(run_of(rule, mesh), jax.devices())
    program = made.program
    params = program.step.state.abstract.params
    devices = made.mesh.size
    assert unordered(program.compiled(program.evaluate, params, program.step.batch).as_text(), devices) == []
    with jax.set_mesh(made.mesh):
        placed = trained.within(made, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype, device=a.sharding), params))
        names = []
        generator = placed.generator()
        compiled = lambda name, jitted, *args: names.append(name) or order_checked(
            generator.compiled(name, jitted, *args), devices)
        dataclasses.replace(generator, compiled=compiled).complete([[5]], GenerationLimits(3))
    assert len(names) == 3


def test_without_the_order_the_head_meets_the_layers():
    """What the reading above is worth: the same step as one process compiles it."""
    case = parity.compiled(run_of("zero3", dict(fsdp=8)))
    assert unordered(case.step.as_text(), case.made.mesh.size)


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
    assert unordered(text("%y", "{{0,1},{2,3}}"), 4) == ["main: loop and late"]
    assert not unordered(text("%loop", "{{0,1},{2,3}}"), 4)
    assert not unordered(text("%y", "{{0,2},{1,3}}"), 4), "other groups do not meet"
