"""python -m meshtrain.convert HF_DIR: prints the [model] table of a folder of Hugging Face's, whose every tensor is accounted for.

To start a run from it: --checkpoint.init_from HF_DIR. No weights are read.
Exit codes: 0 · 2 the user's mistake, one message.
"""
from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from meshtrain.run import say

if __name__ == "__main__":      # before jax is imported: its C++ reports what it does not find
    say.begin()
    os.environ["JAX_PLATFORMS"] = "cpu"
    with say.without_noise():
        importlib.import_module("jax")

from meshtrain import config
from meshtrain.config import ConfigError
from meshtrain.model import transformer
from meshtrain.weights import folder

USAGE = "python -m meshtrain.convert HF_DIR"


def main(argv: Sequence[str]) -> int:
    try:
        if {"--help", "-h"} & set(argv):
            say.out(f"usage: {USAGE}\n\n{__doc__.rstrip()}")
            return 0
        if len(argv) != 1 or argv[0].startswith("-"):
            raise ConfigError(f"{' '.join(argv) or 'nothing'} is not what can be converted; the usage is {USAGE}")
        say.out(_table(Path(argv[0])))
        return 0
    except ConfigError as error:
        say.err(f"error: {error}")
        return 2


def _table(directory: Path) -> str:
    """The section [model] of a folder. Raises: ConfigError with every fault of it."""
    with config.user_errors():
        found = folder.open_folder(directory)
        shape = config.Model(**found.model)
        parameters = transformer.build(shape).parameters()
        folder.match(found, shape, [info.name for info in parameters])
    size = sum(entry.stop - entry.start for entry in found.entries.values())
    window = [f"# It looks back {found.longest} tokens, which [model] cannot: keep data.seq_len at that or less."] if found.longest else []
    return "\n".join([
        f"# {found.directory}: {found.family.architecture}, {len(found.entries)} tensors of {size / 1e9:.2f} GB", *window,
        config.shape_table(shape)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
