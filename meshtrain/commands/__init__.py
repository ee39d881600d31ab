"""Commands whose names are also functions of the Python interface. `python -m meshtrain.NAME` runs `commands.NAME`;
`mt.NAME` is a function in `meshtrain.interface`."""
