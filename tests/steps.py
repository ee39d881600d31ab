"""What a compiled step must hold, send and multiply, by its rule file and its schedule. Checks take a compiled run."""
import functools
import re
from types import SimpleNamespace

import parity
import pytest

from meshtrain import pattern
from meshtrain.cost.program import audit, hlo
from meshtrain.inspection import memory
from meshtrain.model import transformer
from meshtrain.parallel.pipeline import schedules

SMALL = 4096  # bytes: loss and norm scalars, token ids
# Of float32 parameters: 4 bytes, accumulators 4, AdamW's states 8, parameters stored as its moments. ZeRO-1 and ZeRO-2
# read whole weights beside them (arXiv:1910.02054 counts these 2, gradients 2 and the split 12).
PER_PARAM = {"ddp": lambda n: 16, "zero1": lambda n: 4 + 12 / n, "zero2": lambda n: 16 / n, "zero3": lambda n: 16 / n}


def check_bytes(case: parity.Compiled) -> None:
    """A device holds the bytes of parameters, accumulators and states that the rules say."""
    held, ruled = memory.measure(case.made, case.step), memory.formula(case.made)
    assert (held["params"], held["optimizer"]) == (ruled["params"], ruled["optimizer"])
    # A pipeline carries its accumulators otherwise, and so does a loop whose tensor ranks share a key head.
    if not case.made.choice and case.made.run.mesh.tensor <= case.made.run.model.num_kv_heads:
        assert held["grads"] in (ruled["grads"], None)


def check_bytes_per_parameter(case: parity.Compiled, rule: str, n: int) -> None:
    """The table of ZeRO's paper, of a run on mesh.fsdp=n alone."""
    held = memory.measure(case.made, case.step)
    count = sum(info.size for info in case.made.model.parameters())
    measured = (held["params"] + held["grads"] + held["optimizer"]) / count
    # Norms and biases of heads are whole on every device.
    assert memory.read_bytes(case.made) / count == pytest.approx(4 if rule in ("zero1", "zero2") else 0, abs=0.1)
    assert measured == pytest.approx(PER_PARAM[rule](n), rel=0.06)


def check_axes(case: parity.Compiled) -> None:
    """Collectives stay on the mesh axes that the rule file names. A part of an axis has another name and fails, too, but
    for the tensor ranks that share a key head and add up its gradient."""
    named = {axis for table in case.made.layout.rules.tables.values() for axes in table.values() for axis in axes}
    shared = case.made.run.mesh.tensor > case.made.run.model.num_kv_heads
    for c in case.audit.collectives:
        axes = {"tensor" if shared and axis.startswith("tensor:") else axis for axis in c.axes}
        assert axes <= named, c


def check_once_a_step(case: parity.Compiled) -> None:
    """Over axes that [grads] does not name gradients are reduced once a step.

    ddp, zero1, hsdp over data, tensor: one reduction of the accumulators' bytes, none in the microbatch loop. Of what
    the optimizer alone splits besides (zero1 over context) each device reduces its own part.
    """
    once, rule = set(case.made.program.step.deferred_axes), case.made.layout
    own = set(rule.mesh_axes("optimizer", "embed")) - set(rule.mesh_axes("grads", "embed")) - once
    over = [c for c in case.audit.collectives if once & set(c.axes)]
    assert [c for c in over if c.trips > 1] == []
    reduced = sum(c.payload_bytes for c in over if c.kind in ("all-reduce", "reduce-scatter"))
    expected = memory.formula(case.made)["grads"] // rule.num_shards(own) if once else 0
    assert expected <= reduced <= expected + SMALL or not once and reduced == 0


# ---- sequences over devices ------------------------------------------------------------------------------------------


def permutes(program: audit.ProgramAudit, dtype: str, backward: bool) -> SimpleNamespace:
    """Arrays and bytes that a device sends on, per step."""
    found = [c for c in program.collectives if c.kind == "collective-permute" and c.dtype == dtype
             and ("transpose(" in c.source) == backward]
    assert {c.axes for c in found} <= {("context",)}
    return SimpleNamespace(count=sum(c.count for c in found), bytes=sum(c.bytes for c in found))


def check_context(case: parity.Compiled) -> None:
    """Of a run in float32 whose mesh has context alone: what each method sends.

    The ring: forward (cp-1)·(K+V), backward as much again and cp·(dK+dV) in float32; the recomputation sends nothing.
    """
    run, program = case.made.run, case.audit
    assert not program.broken_permutes
    if run.context.method != "ring":
        kinds = {c.kind for c in program.collectives if "context" in c.axes}
        assert dict(gather="all-gather", ulysses="all-to-all")[run.context.method] in kinds
        assert "collective-permute" not in kinds
        return
    cp, m, M = run.mesh.context, run.model, run.training.microbatches
    each = 4 * run.data.global_batch // M * run.data.seq_len // cp * m.num_kv_heads * m.head_dim
    times = 2 * M * m.num_layers                                # K and V
    forward, backward = permutes(program, "f32", False), permutes(program, "f32", True)
    assert forward.count == (cp - 1) * times and backward.count == (2 * cp - 1) * times
    assert (forward.bytes, backward.bytes) == (forward.count * each, backward.count * each)
    ids = permutes(program, "s32", False).bytes + permutes(program, "s32", True).bytes
    assert 0 < ids <= (forward.bytes + backward.bytes) / 16     # [B, T] int32 beside [B, T, K, H]


# ---- pipelines -------------------------------------------------------------------------------------------------------


def schedule_of(run) -> schedules.Schedule:
    return schedules.make(run.pipeline.schedule, run.mesh.stage, run.training.microbatches, run.pipeline.chunks)


def check_schedule(case: parity.Compiled) -> None:
    """Every F and every B of the schedule sends once over the stages; gradients leave over the batch once a step."""
    executed, sizes = case.made.choice.schedule.executed, case.made.mesh_spec.sizes
    # An interleaved order also moves each layer to its stage and back, before and after: XLA's permutes, not ours.
    sent = [c for c in case.audit.collectives if c.axes == ("stage",) and "ppermute" in c.source]
    assert sum(c.count for c in sent) == executed["F"] + executed["B"]
    assert not unordered(case.step.as_text())
    # Other methods than the ring send over context in every tick.
    axes = ("data", "fsdp", *(["context"] if case.made.run.context.method == "ring" else []))
    batch = {axis for axis in axes if sizes[axis] > 1}
    assert not [c for c in case.audit.collectives if batch & set(c.axes) and c.trips > 1
                and c.kind != "collective-permute" and c.payload_bytes / c.trips > 64]


def unordered(text: str) -> list[tuple[str, str]]:
    """Instructions that send by hand in the same way, one of them a loop or a branch, and do not wait for each other.

    On CPUs what they send may pair up, once in a hundred runs: `ordered`. A loop of one trip is no loop any more.
    """
    module = hlo.parse(text)
    by_hand = {"collective-permute": "ppermute", "all-reduce": "psum|pmax"}
    here = lambda ins: {ins.op} if ins.op in by_hand and re.search(by_hand[ins.op], ins.op_name) else set()
    inside = functools.cache(lambda name: set().union(*map(kinds, module.computations[name].values())))
    kinds = lambda ins: here(ins).union(*map(inside, ins.callees))
    found = []
    for scope in module.computations.values():
        before, senders = {}, []
        for ins in scope.values():                                     # an instruction stands behind its operands
            before[ins.name] = set(ins.operands).union(*(before.get(name, ()) for name in ins.operands))
            if kinds(ins):
                found += [(other.name, ins.name) for other in senders if other.name not in before[ins.name]
                          and kinds(other) & kinds(ins) and not (here(other) and here(ins))]
                senders.append(ins)
    return found


def check_flops(case: parity.Compiled) -> None:
    """Of a dense run over stages alone: matmuls of a device are those of the schedule's ticks. Remat alone computes
    again, not the split."""
    run, schedule = case.made.run, schedule_of(case.made.run)
    cfg, T, sequences = run.model, run.data.seq_len, run.data.global_batch // run.training.microbatches
    linear = {info.path[-2]: 2 * sequences * T * info.size // cfg.num_layers
              for info in case.made.model.parameters() if info.role == "matrix"}
    product = 2 * sequences * T * T * cfg.num_heads * cfg.head_dim      # one of attention's, scores or p·v
    forward = sum(linear.values()) + 2 * product
    backward = 2 * sum(linear.values()) + 5 * product
    scores_again = 0
    if run.training.remat == "full":
        # The last output is not asked for again; scores of a single block are made once for both directions, or (jax
        # 0.12) once for each.
        backward += forward - linear["down"] - product
        scores_again = product
    places = schedule.num_stages * schedule.num_chunks
    depth = pattern.count_padded(cfg, places) // places
    executed = schedule.executed
    head = 3 * 2 * sequences * T * cfg.embed_dim * transformer.pad_vocab(cfg) // schedule.num_stages
    # The loss of some runs is in a branch that is taken where the schedule says, the same on all devices.
    always = sum(part.stop - part.start for part in schedule.phases() if part.loss == "always")
    expected = depth * (executed["F"] * forward + executed["B"] * backward) + always * head
    if schedule.split:                                                     # W has its own ticks, as many as it has work
        expected += depth * (executed["W"] - executed["B"]) * sum(linear.values())
    got = sum(dot.flops for dot in case.audit.dots if not dot.in_branch)
    assert any(got == pytest.approx(expected + again, rel=1e-3) for again in (0, depth * executed["B"] * scores_again))


# ---- simulated devices in several processes --------------------------------------------------------------------------

EVERYONE = frozenset()      # permutes of all devices share one group


def meeting(text: str, num_devices: int) -> list[str]:
    """Pairs of a loop (or branch) and a collective, or another loop, of one computation, neither of which waits for the
    other, though both hold a collective of the same devices: Gloo would pair the two."""
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
        return set().union(*(held(name) for name in ins.callees if name in module.computations))

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
