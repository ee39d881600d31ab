"""meshtrain: decoder-only language models on a five-axis device mesh.

`import meshtrain as mt` gives the Python interface (`meshtrain.interface`, docs/python.md): `mt.Experiment`,
`mt.Rules`, `mt.compare`, `mt.plan`, `mt.schedule`, `mt.prove`. It imports nothing before one of them is used, starts
no backend and sets no flag.
"""
import importlib
import types

__version__ = "0.1.0"

_INTERFACE = ("Experiment", "Rules", "compare", "schedule")
_COMMANDS = ("plan", "prove")       # functions of the interface, and modules of commands


class CommandModule(types.ModuleType):
    """The module of a command that is also a function: `mt.plan("llama3-8b", gpus=64, gpu="h100")`."""

    def __call__(self, *args, **keys):
        return getattr(importlib.import_module("meshtrain.interface"), self.__name__.rpartition(".")[2])(*args, **keys)


def __getattr__(name: str):
    if name in _COMMANDS:
        return importlib.import_module(f"meshtrain.{name}")
    if name in _INTERFACE:
        return getattr(importlib.import_module("meshtrain.interface"), name)
    raise AttributeError(f"module 'meshtrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_INTERFACE, *_COMMANDS])
