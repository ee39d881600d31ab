"""Readable names of kernels: "backward, weight gradient of mlp/gate" for an einsum inside JAX's transforms.

The source of a kernel is the shortened JAX path of its instruction. A projection is an einsum whose letters name
dimensions. The letters are the same in the whole program, so a weight is identified by the letters of its logical axes.
"""
from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

LETTERS = {"embed": "D", "mlp": "F", "heads": "N", "kv_heads": "K", "head_dim": "H", "vocab": "V", "expert": "E"}
EINSUM = re.compile(r"(\w+),(\w+)->(\w+)")
KERNELS = (("_dkv", "backward, gradients of keys and values"), ("_dq", "backward, gradient of queries"),
           ("_forward", "forward"), ("_backward", "backward"))
# Last component of a path, or XLA's name of a kernel without a path -> its readable name.
OPERATIONS = {"dynamic_slice": "read of a slice", "dynamic_update_slice": "write of a slice", "reduce_sum": "sum",
              "add_any": "sum of gradients", "add": "addition", "sub": "subtraction", "mul": "product",
              "div": "quotient", "neg": "negation", "convert_element_type": "conversion to another type",
              "concatenate": "concatenation", "stack": "concatenation", "select_n": "selection",
              "broadcast_in_dim": "fill", "broadcast": "fill", "loop_broadcast_fusion": "fill", "copy": "copy",
              "wrapped_transpose": "transposition", "loop_transpose_fusion": "transposition",
              "input_transpose_fusion": "transposition", "transpose": "transposition", "reshape": "change of shape",
              "wrapped_slice": "slice", "slice": "slice", "wrapped_concatenate": "concatenation",
              "reduce_max": "maximum", "reduce_min": "minimum", "reduce_or": "any", "scatter-add": "sum into rows",
              "gather": "read of rows", "psum": "sum over devices", "rsqrt": "inverse square root",
              "ppermute": "exchange with neighbours", "sharding_constraint": "change of sharding"}
# Path prefix of a source file -> what it computes. The longest matching prefix applies.
PLACES = {"model/loss.py": "head and loss", "model/rope.py": "rotary embedding", "model/layers.py": "layers",
          "model/block.py": "layers", "model/mlp.py": "layers", "model/dropout.py": "layers",
          "model/": "model", "kernels/activations.py": "activation function", "kernels/": "kernels",
          "parallel/context/": "attention", "parallel/experts/": "experts", "training/executor.py": "pipeline",
          "training/shard.py": "pipeline", "training/backward.py": "pipeline", "training/optimizer.py": "optimizer",
          "training/": "training step"}


def weights(parameters: Sequence[Mapping]) -> dict[str, str]:
    """Return letters of a weight -> its name; weights with the same letters share one entry. A dimension without a
    logical axis is a dot. parameters: rows of the JSON of `inspect`, with name and axes."""
    names_by_shape: dict[str, list[str]] = {}
    for row in parameters:
        letters = "".join(LETTERS.get(axis, ".") for axis in row["axes"] if axis != "layers")
        if len(letters.replace(".", "")) and len(letters) > 1 and not row["name"].endswith("bias"):
            names_by_shape.setdefault(letters, []).append(row["name"].removeprefix("layers/").removesuffix("/kernel"))
    return {letters: " and ".join(sorted(set(names))) if len(set(names)) < 4 else f"{len(set(names))} weights"
            for letters, names in names_by_shape.items()}


def describe(row: Mapping, names: Mapping[str, str]) -> str:
    """Return the readable name of a kernel or collective. row: the JSON of the kernel or collective. names: the result
    of `weights`."""
    source, line = row["source"], row.get("line", "")
    backward, again = "transpose(" in source, "/remat/" in f"/{source}/"
    when = "recomputed, " if again else "backward, " if backward else ""
    if product := EINSUM.search(source):
        return _product(product, "recomputed" if again else "backward" if backward else "", line, names)
    if row.get("part") == "attention":
        for ending, words in KERNELS:
            if ending in source and "_attention" in source:
                return f"attention, {words}"
    if not source:
        return ""
    last = source.split(" (+")[0].split("/")[-1].rstrip(")" if source.startswith("(") else "")     # "(one/op:other/op)"
    last = re.sub(r"[.\d]+$|(\.\d+)?\.remat\d*$", "", last)
    return f"{when}{OPERATIONS.get(last, last)}{_place(line, row)}"


def _place(line: str, row: Mapping) -> str:
    if row.get("part") in ("attention", "optimizer"):
        return f", {row['part']}"
    place = max((begin for begin in PLACES if line.startswith(begin)), key=len, default="")
    return f", {PLACES[place]}" if place else ""


def _product(einsum: re.Match[str], when: str, line: str, names: Mapping[str, str]) -> str:
    """Return the name of a matmul by its letters. The forward contracts the first dimensions of a weight, the backward
    its last ones."""
    one, other, out = einsum.groups()
    if grown := _weight(out, names):
        return f"backward, weight gradient of {names[grown]}"
    known, letters = next(((known, letters) for letters in (other, one) if (known := _weight(letters, names))),
                          (None, ""))
    if known is None:
        return f"{when or 'forward'}, {one} × {other} -> {out}{_place(line, {})}"
    weight = _plain(letters)
    inner = "".join(letter for letter in weight if letter in one and letter in other and letter not in out)
    is_table = weight == "VD"       # the embedding table: as the head, its last dimension is contracted forward
    forward = bool(inner) and weight.startswith(inner) != is_table
    named = names[known] + ", as the head" * (is_table and "loss.py" in line)
    if forward:
        return f"{'recomputed' if when else 'forward'}, {named}"
    return f"backward, input gradient of {named}"


def _weight(letters: str, names: Mapping[str, str]) -> str | None:
    """Return the key in `names` of a weight with these letters; None if there is none."""
    plain = _plain(letters)
    if plain in names:
        return plain
    return None if {"B", "T"} & set(plain) else next((known for known in names if re.fullmatch(known, plain)), None)


def _plain(letters: str) -> str:
    """Return the letters without the lower-case ones, which stand for dimensions of devices and parts."""
    return re.sub("[a-z]", "", letters)
