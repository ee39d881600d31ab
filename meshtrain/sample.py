"""python -m meshtrain.sample: see `meshtrain.commands.sample`."""
import sys

if __name__ == "__main__":
    if not __package__:     # started by its path, its folder's modules would hide those of Python
        print("error: start it as python -m meshtrain.sample", file=sys.stderr)
        sys.exit(2)
    from meshtrain import commands
    commands.start("sample")
