"""Checks the arguments of an experiment: counts, meshes, batches, token ids. Every mistake is a ConfigError."""
from __future__ import annotations

import contextlib
import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from meshtrain import config
from meshtrain.config import ConfigError
from meshtrain.config.messages import join, keys_of
from meshtrain.names import AXES, NO_TARGET
from meshtrain.units import shorten


def check_count(name: str, value: object, least: int = 1) -> int:
    """Return `value` if it is a whole number of at least `least`. name: the argument's name, for messages. Raises:
    ConfigError."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ConfigError(f"{name}={value!r} is not a whole number of at least {least}")
    return int(value)


def form(leaf: Any) -> tuple:
    """Return (shape, dtype) of an array, a number or a ShapeDtypeStruct, as jax would hold it."""
    return np.shape(leaf), jax.dtypes.canonicalize_dtype(getattr(leaf, "dtype", None) or np.asarray(leaf).dtype)


def check_batch(batch: object, expected: Mapping[str, jax.ShapeDtypeStruct], vocab_size: int) -> dict[str, np.ndarray]:
    """Return the arrays of a batch that a step reads, in the step's dtypes. expected: `Step.batch`, [microbatches,
    replicas, sequences, …]. Raises: ConfigError with every fault and the expected arrays."""
    shapes = {name: (math.prod(one.shape[:3]), *one.shape[3:]) for name, one in expected.items()}
    arrays = [f"{name} {_describe(shapes[name], one.dtype)}" for name, one in expected.items()]
    wanted = f"a batch is a dict of {', '.join(arrays)}"
    remedy = "`batch()` of the experiment makes one"
    if not isinstance(batch, Mapping):
        raise ConfigError(f"batch={shorten(batch)} is a {type(batch).__name__}; {wanted}; {remedy}")
    faults, found = [], {}
    if missing := [name for name in expected if name not in batch]:
        others = [repr(key) for key in batch if key not in expected]
        more = f"; it has {join(others, 'and')}" if others else ""
        faults.append(f"batch has no {join(missing, 'and')}{more}")
    for name, one in expected.items():
        if name in missing:
            continue
        try:
            found[name] = array = np.asarray(batch[name])
        except ValueError:
            faults.append(f"batch[{name!r}] has rows of different lengths")
            continue
        kinds = "iu" if np.issubdtype(one.dtype, np.integer) else "iuf"
        if array.dtype.kind not in kinds or array.shape != shapes[name]:
            faults.append(f"batch[{name!r}] is {_describe(array.shape, array.dtype)}, but this run needs "
                          f"{_describe(shapes[name], one.dtype)}")
        elif name in ("tokens", "targets") and (outside := _outside(array, vocab_size, name == "targets")):
            faults.append(f"batch[{name!r}] has {outside}")
    if faults:
        raise ConfigError(*faults, f"{wanted}; {remedy}")
    return {name: array.astype(expected[name].dtype) for name, array in found.items()}


def check_tokens(tokens: object, vocab_size: int, name: str = "tokens") -> np.ndarray:
    """Return token ids as an int32 array [B, T]. name: the argument's name, for messages. Raises: ConfigError."""
    try:
        array = np.asarray(tokens)
    except ValueError:
        raise ConfigError(f"{name} has rows of different lengths; give token ids [B, T], e.g. [[1, 2, 3]]") from None
    if array.ndim != 2 or array.dtype.kind not in "iu" or 0 in array.shape:
        raise ConfigError(f"{name} is {_describe(array.shape, array.dtype)}; give integers [B, T] with a row for each "
                          f"sequence, e.g. [[1, 2, 3]]")
    if outside := _outside(array, vocab_size, False):
        raise ConfigError(f"{name} has {outside}")
    return array.astype(np.int32)


def check_prompt(prompt: object, vocab_size: int) -> str | list[int]:
    """Return a prompt: text, or a list of token ids. Raises: ConfigError."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, (Sequence, np.ndarray)) or not len(prompt):
        raise ConfigError(f"prompt={shorten(prompt)} is neither a text nor token ids; give e.g. \"def \" or [1, 2, 3]")
    return check_tokens([list(prompt)], vocab_size, "prompt")[0].tolist()


def mesh_words(mesh: Mapping[str, int], words: Sequence[str]) -> list[str]:
    """Return sizes of axes as words of a command line. words: the words of the settings. Raises: ConfigError."""
    if not isinstance(mesh, Mapping):
        raise ConfigError(f'mesh={mesh!r} is not a dict; write e.g. mesh={{"fsdp": 8}}')
    if other := [name for name in mesh if name not in AXES]:
        homes = [key.removeprefix("mesh.") for key in keys_of(str(other[0])) if key.startswith("mesh.")]
        near = homes or difflib.get_close_matches(str(other[0]), AXES, n=1)
        remedy = f"did you mean {near[0]!r}?" if near else f"the axes are {', '.join(AXES)}"
        raise ConfigError(f"mesh has no axis {other[0]!r}; {remedy}")
    if twice := [axis for axis in mesh if any(word.startswith(f"--mesh.{axis}=") for word in words)]:
        raise ConfigError(f"mesh.{twice[0]} is given twice, in settings and in mesh; give it once")
    return config.words({f"mesh.{axis}": n for axis, n in mesh.items()})


def _outside(array: np.ndarray, vocab_size: int, targets: bool) -> str:
    """Return a text about ids outside the vocabulary; "" if there are none. targets: whether NO_TARGET is allowed,
    too."""
    wrong = (array < 0) | (array >= vocab_size)
    wrong &= array != NO_TARGET if targets else True
    more = f", or {NO_TARGET} for no target" if targets else ""
    return f"{array[wrong][0]}, and token ids are 0 to {vocab_size - 1}{more}" if wrong.any() else ""


def _describe(shape: Sequence[int], dtype: object) -> str:
    return f"{np.dtype(dtype).name if not str(dtype).startswith('<U') else 'text'} [{', '.join(map(str, shape))}]"


@contextlib.contextmanager
def reword_for_python() -> Iterator[None]:
    """Context manager: rewrite options in the messages of ConfigErrors as Python names: --seq-len becomes seq_len."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(*(re.sub(r"--([a-z][a-z-]*)", lambda option: option[1].replace("-", "_"), message)
                            for message in error.messages)) from None
