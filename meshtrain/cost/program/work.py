"""Counts the FLOPs and HBM bytes of one kernel of a compiled GPU program: its matmuls, its attention, its memory
traffic.

Counts the bytes that a kernel touches. A fusion reads only those elements of its parameters that its outputs depend on:
a dynamic-slice of stacked weights counts one layer. A dynamic-update-slice into a parameter of the fusion writes the
update and does not read the buffer. Caches are not modelled: data that two kernels read counts twice.
"""
from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable

from meshtrain.cost.program import hlo
from meshtrain.cost.formulas.rates import AttentionKernel, GroupedMatmul, Matmul
from meshtrain.kernels import grouped as kernels
from meshtrain.kernels import mosaic_mlp, recurrence_blocks, recurrence_pallas, rotation, tiles
from meshtrain.scopes import BALANCED_ROWS

# Names of existing arrays, without a kernel: see `free`.
FREE = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all",
        "opt-barrier", "optimization-barrier", "partition-id", "replica-id"}
_UPDATES = ("dynamic-update-slice", "scatter")      # update a part of their first operand
_FUSIONS = ("fusion", "fusion-start")               # jax 0.12 runs some asynchronously
_WHOLE = ("dot", "scaled-dot", "ragged-dot", "convolution", "custom-call", "sort", "rng-bit-generator")
PRODUCTS = {"forward": (1, 1), "dq": (2, 1), "dkv": (2, 2)}  # of our kernels with keys and values, per visited pair
# `kernels.engine.Mask.label`
_OURS = re.compile(r"meshtrain_(attention|mosaic)_(forward|dq|dkv)(_causal)?(?:_window(\d+))?(?:_ahead(\d+))?")
# `kernels.grouped` and `kernels.mosaic_grouped`, with the order of a matrix's dims
_GROUPED = re.compile(r"\bgrouped_(rows|mosaic|outer)_([gkn]{3})\b")
_MLP = re.compile(rf"\b{mosaic_mlp.NAME}_(forward|backward)\b")
_RECURRENCE = re.compile(rf"\b{recurrence_blocks.NAME}_([a-z_]+?)({recurrence_blocks.DELTA})?\b")
_CUDNN_WINDOW = re.compile(r'"sliding_window_length":\s*(\d+)')


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of one execution of a kernel. hbm_bytes: bytes read plus bytes written. known: False if the kernel is a
    matmul of unknown size."""
    matmuls: tuple[Matmul, ...]
    attention: AttentionKernel | None
    hbm_bytes: int
    known: bool = True
    grouped: GroupedMatmul | None = None

    @property
    def flops(self) -> float:
        return sum(one.flops for one in (*self.matmuls, self.attention, self.grouped) if one)


def free(ins: hlo.Instruction) -> bool:
    """Whether an instruction runs no kernel. `lax.empty` is such a case: it names memory that is not written
    (openxla/xla 10638)."""
    return ins.op in FREE or ins.target == "AllocateBuffer"


def of(module: hlo.HloModule, computation: str, ins: hlo.Instruction, visited) -> Work:
    """Count the work of a kernel: an instruction that is neither `free` nor a loop nor a collective.

    visited(queries, keys, causal, window, ahead) returns the pairs of a packed row that a Pallas attention kernel
    visits.
    """
    attention = _attention(module, computation, ins, visited)
    matmuls, routed = tuple(_matmuls(module, computation, ins)), read_grouped(module, computation, ins)
    matmuls = matmuls or tuple(_recurrence(module, computation, ins))
    known = bool(attention or matmuls or routed or not multiplies(ins))
    return Work(matmuls, attention, sum(traffic(module, computation, ins)), known, routed)


# ---- FLOPs -----------------------------------------------------------------------------------------------------------


def matmul(module: hlo.HloModule, computation: str, ins: hlo.Instruction) -> Matmul | None:
    """Return the sizes of an HLO dot or of a cuBLAS call, whose dimension numbers are in its backend_config. Return
    None for anything else."""
    if ins.op in ("dot", "scaled-dot"):
        contracting, batch = ins.ints("lhs_contracting_dims"), ins.ints("lhs_batch_dims")
    else:
        def numbers(key: str) -> re.Match[str] | None:
            return re.search(rf'"{key}":\[([^\]]*)\]', ins.attrs)
        if not numbers("lhs_contracting_dimensions") or "fmha" in ins.target:   # fused attention is no single matmul
            return None
        contracting, batch = (tuple(map(int, re.findall(r"\d+", match.group(1)))) if (match := numbers(key)) else ()
                              for key in ("lhs_contracting_dimensions", "lhs_batch_dimensions"))
    lhs, rhs = module.operand_shapes(computation, ins)[:2]
    output = hlo.shapes(ins.type_text)[0][1]                                    # cuBLAS returns (result, workspace)

    def size(dims: Iterable[int]) -> int:
        return math.prod(lhs[1][d] for d in dims)
    k, batches = size(contracting), size(batch)
    m = math.prod(lhs[1]) // (k * batches)
    return Matmul(m, math.prod(output) // (m * batches), k, batches, max(lhs[0], rhs[0], key=hlo.dtype_bits))


def read_grouped(module: hlo.HloModule, computation: str, ins: hlo.Instruction) -> GroupedMatmul | None:
    """Return the sizes of a grouped matmul, or of a kernel of `kernels.mosaic_mlp` (one group). Return None for
    anything else. The rows are those of balanced experts if the instruction's scope names them, otherwise the whole
    buffer."""
    if ins.op in _FUSIONS:      # around a kernel that writes into a stacked array or reads slices of one
        inside = (read_grouped(module, name, inner)
                  for name in ins.callees for inner in module.computations[name].values())
        return next(filter(None, inside), None)
    if ins.op == "custom-call" and (match := _MLP.search(ins.op_name)):
        (dtype, (rows, k)), (_, matrix) = module.operand_shapes(computation, ins)[:2]
        forward = match[1] == "forward"
        n = (1 + forward) * matrix[1]       # gate and up
        # elements beyond the product's output: h; of the backward gate, up, dup and h
        more = rows * n // 2 if forward else 4 * rows * n
        return GroupedMatmul(rows, 1, k, n, dtype, "mosaic", more * hlo.dtype_bits(dtype) // 8)
    match = _GROUPED.search(ins.op_name) if ins.op == "custom-call" else None
    if not match:
        return None
    outer, arrays = match[1] == "outer", module.operand_shapes(computation, ins)
    matrices = hlo.shapes(ins.type_text) if outer else [shape for shape in arrays if len(shape[1]) == 3]
    groups, summed, n = (sum(dims[match[2].index(letter)] for _, dims in matrices) for letter in "gkn")
    groups, n = groups // len(matrices), n // len(matrices)
    dtype, (held, _) = next((dtype, dims) for dtype, dims in arrays if len(dims) == 2)
    held = next((rows for _, rows in _row_gathers(arrays)), held)
    block, even = tiles.GROUPED[hlo.dtype_bits(dtype) // 8].rows, BALANCED_ROWS.parse(ins.op_name)
    executed = min(held, kernels.count_executed_rows(even[0], groups, block)) if even else held
    return GroupedMatmul(executed, groups, summed, n, dtype, match[1])


def _recurrence(module: hlo.HloModule, computation: str, ins: hlo.Instruction):
    """Yield the matmuls of a kernel of `kernels.recurrence_pallas`, for all chunks and heads.

    Its operands include keys [B, T, K, H] and values [B, T, N, V]. They also include either rates [B, N, T] with two
    integers per chunk [B, Z], or decays of chunks [B, N, Z, H].
    """
    match = _RECURRENCE.search(ins.op_name) if ins.op == "custom-call" else None
    if not match:
        return
    what, arrays = match[1], module.operand_shapes(computation, ins)

    def of(dtype: str, dims: int) -> list[tuple[int, ...]]:
        return [shape for name, shape in arrays if name == dtype and len(shape) == dims]
    of_chunks, H = of("s32", 2), of("bf16", 4)[0][-1]
    heads = math.prod(of_chunks[-1]) * of("f32", 3)[0][1] if of_chunks else math.prod(of("f32", 4)[0][:3])
    # dtype of the operands, else of the first result
    values = {"gradients": 2, recurrence_pallas.CHANNELS + "gradients": 2, "inside_gradients": 1}.get(what)
    V = (hlo.shapes(ins.type_text)[0][1] if values is None else of("bf16", 4)[values])[-1]
    for shape, count in Counter(recurrence_pallas.products_of(what, H, V, bool(match[2]))).items():
        yield Matmul(*shape, count * heads, "bf16")


def _row_gathers(arrays):
    """Yield (operand index, number of rows) for each operand whose rows a grouped kernel gathers. The operand after it
    holds the row indices."""
    for at, ((_, dims), (dtype, numbers)) in enumerate(zip(arrays, arrays[1:])):
        if len(dims) == 2 and dtype == "s32" and len(numbers) == 1:
            yield at, numbers[0]


def multiplies(ins: hlo.Instruction) -> bool:
    """Whether an instruction is a matmul or a custom call that may contain one."""
    if ins.op in ("dot", "scaled-dot", "ragged-dot"):
        return True
    if rotation.NAME in ins.op_name:
        return False
    return bool(re.search(r"gemm|matmul|fmha|triton|mosaic|pallas|cudnn\$", ins.target, re.IGNORECASE))


def _matmuls(module, computation, ins):
    """Yield the matmuls of an instruction and of the computations that a fusion calls."""
    if product := matmul(module, computation, ins):
        yield product
    if ins.op in (*_FUSIONS, "call", "async-start"):
        for called in ins.callees:
            for inner in module.computations[called].values():
                yield from _matmuls(module, called, inner)


def _attention(module, computation, ins, visited) -> AttentionKernel | None:
    """Return the attention kernel of cuDNN or of this project's Pallas kernels, or None for anything else. The first
    4-d operands are q [B, T, N, H], k [B, S, K, H] and v [B, S, K, V]."""
    if ins.op in _FUSIONS:      # jax 0.12 fuses slices of stacked operands into a kernel's call
        inside = (_attention(module, name, inner, visited) for name in ins.callees
                  for inner in module.computations[name].values())
        return next((found for found in inside if found), None)
    ours = _OURS.search(ins.attrs) if ins.op == "custom-call" else None
    if not ours and "fmha" not in ins.target:
        return None
    arrays = [dims for _, dims in module.operand_shapes(computation, ins) if len(dims) == 4]
    (B, T, N, H), (_, S, _, _) = arrays[:2]
    if ours:
        name, kernel, causal, window, ahead = ours.groups()
        V = arrays[2][3] if len(arrays) > 2 else H
        flops = 2 * B * N * (PRODUCTS[kernel][0] * H + PRODUCTS[kernel][1] * V) * visited(
            T, S, bool(causal), int(window or 0), int(ahead or 0))
        engine = "mosaic" if name == "mosaic" else "pallas"
        return AttentionKernel(engine, "forward" if kernel == "forward" else "backward", flops, S, H)
    backward, causal = "Backward" in ins.target, '"mask_type":"NO_MASK"' not in ins.attrs
    window = int(found.group(1)) if (found := _CUDNN_WINDOW.search(ins.attrs)) else 0
    pairs = window * (T - window / 2) if 0 < window < T else T * S / 2 if causal else T * S
    return AttentionKernel("cudnn", "backward" if backward else "forward",
                           (5 if backward else 2) * 2 * B * N * H * pairs, S, H)


# ---- bytes -----------------------------------------------------------------------------------------------------------


def traffic(module: hlo.HloModule, computation: str, ins: hlo.Instruction) -> tuple[int, int]:
    """Return (HBM bytes read, HBM bytes written) by one execution."""
    if ins.op not in _FUSIONS:
        scope = module.computations[computation]
        update = ins.name if ins.op in _UPDATES else None
        needs = _needs(module, scope, ins, _elements(ins), bool(update))
        return sum(_bytes(scope[name], count) for name, count in needs), _count_written(scope, ins, update)
    body = module.computations[ins.callees[0]]
    root = hlo.root(body)
    outputs = [body[name] for name in root.operands] if root.op == "tuple" else [root]
    outputs = [output for output in outputs if not (output.op == "get-tuple-element" and body[
        output.operands[0]].op == "custom-call" and _is_workspace(*hlo.shapes(output.type_text)))]
    updates = {output.name: _update(body, output) for output in outputs}
    needs = _demand(module, body, {output.name: _elements(output) for output in outputs}, set(updates.values()))
    return (sum(_bytes(body[name], count) for name, count in needs.items()),
            sum(_count_written(body, output, updates[output.name]) for output in outputs))


def _count_written(scope: hlo.Computation, output: hlo.Instruction, update: str | None) -> int:
    """Return the bytes that an output writes. An in-place `update` writes only its slice, or the operand that a scatter
    adds."""
    if update:
        part = scope[scope[update].operands[1 if scope[update].op == "dynamic-update-slice" else 2]]
        return _bytes(part, _elements(part))
    arrays = hlo.shapes(output.type_text)
    if output.op == "custom-call" and len(arrays) > 1:      # a workspace follows the results
        arrays = [shape for shape in arrays if not _is_workspace(shape)]
    return sum(map(hlo.shape_bytes, arrays))


def _is_workspace(shape) -> bool:
    """Whether an array among the results of a custom call is its workspace."""
    return shape[0] in ("s8", "u8") and len(shape[1]) == 1


def _update(body: hlo.Computation, output: hlo.Instruction) -> str | None:
    """Return the name of the instruction that updates a parameter of the fusion in place for this output, or None."""
    update = _source(body, output)
    in_place = update.op in _UPDATES and _source(body, body[update.operands[0]]).op == "parameter"
    return update.name if in_place else None


def _source(body: hlo.Computation, ins: hlo.Instruction) -> hlo.Instruction:
    """Return the instruction whose array `ins` copies, converts or reshapes."""
    while ins.op in ("bitcast", "copy", "convert", "reshape") and ins.operands:
        ins = body[ins.operands[0]]
    return ins


def _demand(module: hlo.HloModule, body: hlo.Computation, wanted: dict[str, int], in_place: set) -> dict[str, int]:
    """Return, by name, how many elements of each of a fusion's parameters the wanted elements depend on.

    Walks from the last instruction to the first. Sums the elements that each instruction needs of an operand, at most
    the operand's size.
    """
    need = Counter(wanted)
    for ins in reversed(body.values()):
        if count := min(need[ins.name], _elements(ins)):
            for name, part in _needs(module, body, ins, count, ins.name in in_place):
                need[name] += part
    return {ins.name: min(need[ins.name], _elements(ins)) for ins in body.values() if ins.op == "parameter"}


def _needs(module, body, ins: hlo.Instruction, count: int, in_place: bool):
    """Return (operand, number of its elements) pairs: the elements that `count` elements of an instruction's output
    depend on."""
    operands = [(name, _elements(body[name])) for name in ins.operands if name in body]
    whole, first = _elements(ins), operands[:1]
    if ins.op == "fusion":
        inner = module.computations[ins.callees[0]]
        root = hlo.root(inner)
        names = root.operands if root.op == "tuple" else (root.name,)
        demand = _demand(module, inner, {n: math.ceil(count / whole * _elements(inner[n])) for n in names}, set())
        return [(ins.operands[int(inner[name].args)], part) for name, part in demand.items()]
    if ins.op in _WHOLE:
        if _GROUPED.search(ins.op_name):
            # A row counts once per gather, not once per tile of columns: tiles run side by side and share it in L2.
            arrays = [shape for name, _ in operands for shape in hlo.shapes(body[name].type_text)]
            for at, rows in _row_gathers(arrays):
                operands[at] = operands[at][0], rows * arrays[at][1][1]
        return operands
    if ins.op in ("dynamic-slice", "slice"):
        return [(first[0][0], count), *((name, 1) for name, _ in operands[1:])]
    if ins.op == "gather":
        return [(first[0][0], count), *operands[1:]]
    if ins.op == "dynamic-update-slice":
        update, size = operands[1]
        rest = [] if in_place else [(first[0][0], count)]
        return [*rest, (update, size if in_place else min(size, count)), *((name, 1) for name, _ in operands[2:])]
    if ins.op == "scatter":
        return [(first[0][0], operands[2][1] if in_place else count), *operands[1:]]
    if ins.op in ("reduce", "reduce-window", "concatenate", "pad", "bitcast"):                # in proportion
        return [(name, math.ceil(size * count / whole)) for name, size in operands]
    return [(name, min(size, count)) for name, size in operands]        # element by element, or repeated


def _elements(ins: hlo.Instruction) -> int:
    return sum(math.prod(dims) for _, dims in hlo.shapes(ins.type_text))


def _bytes(ins: hlo.Instruction, count: int) -> int:
    """Return the bytes of `count` elements of an instruction's arrays."""
    whole = _elements(ins)
    return math.ceil(sum(map(hlo.shape_bytes, hlo.shapes(ins.type_text))) * count / whole) if whole else 0
