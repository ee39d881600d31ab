"""Checks which layouts the mixers of a run's own can take."""
from __future__ import annotations

from meshtrain.config.sections import Run
from meshtrain.model.transformer import find_custom
from meshtrain.sharding.rules import Layout


def problems(run: Run, layout: Layout) -> list[str]:
    """Return the reasons why this layout cannot run the model's own mixers; empty if it can. Raises: ValueError if
    their code cannot be loaded."""
    size = layout.sizes["context"]
    return [f'mesh.context={size}: model.custom.{letter}="{value}" gets a part of each sequence, in another '
            f"order; if it reads other tokens by ex.engines only, give the class `context = True`, otherwise use "
            f"mesh.context=1" for letter, value in find_custom(run.model, "context").items() if size > 1]
