"""python -m meshtrain.inspect: see `meshtrain.commands.inspect`."""
import sys

from meshtrain.run import command

if __name__ == "__main__":      # before jax is imported: its C++ reports what it does not find
    command.begin(level=1)      # what XLA warns of while it compiles is read

from meshtrain.commands.inspect import COMMAND, main

__all__ = ["COMMAND", "main"]

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
