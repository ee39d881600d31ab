"""What a command does whose name is also a function of the Python interface. `python -m meshtrain.NAME` runs
`commands.NAME`; `mt.NAME` is a function of `meshtrain.interface`."""
