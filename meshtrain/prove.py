"""python -m meshtrain.prove: see `meshtrain.commands.prove`."""
import sys

from meshtrain.run import command

if __name__ == "__main__":      # before jax is imported, to silence messages of its C++
    command.begin(level=1, platform="cpu")      # warnings of XLA during compilation are read

from meshtrain.commands.prove import COMMAND, main

__all__ = ["COMMAND", "main"]

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
