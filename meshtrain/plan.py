"""python -m meshtrain.plan: see `meshtrain.commands.plan`."""
import sys

from meshtrain.run import command

if __name__ == "__main__":      # before jax is imported, to silence messages of its C++
    command.begin()

from meshtrain.commands.plan import COMMAND, main

__all__ = ["COMMAND", "main"]

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
