"""python -m meshtrain.slurm: see `meshtrain.commands.slurm`."""
import sys

from meshtrain.run import command

if __name__ == "__main__":      # before jax is imported, to silence messages of its C++
    command.begin(platform="cpu")

from meshtrain.commands.slurm import COMMAND, main

__all__ = ["COMMAND", "main"]

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
