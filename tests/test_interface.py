"""The Python interface: its examples, and what it says beside the commands."""
import doctest

import meshtrain as mt
from meshtrain import interface, shown


def test_every_example_of_a_docstring_holds():
    run = mt.Experiment(settings={"mesh.fsdp": 4, "model.num_layers": 2}, rules="zero3")
    for module in (interface, shown):
        found = doctest.testmod(module, extraglobs={"mt": mt, "run": run, "JsonTable": shown.JsonTable, "Rows": shown.Rows})
        assert found.attempted and not found.failed
