"""Checks which layouts a model's mixers can take."""
from __future__ import annotations

from meshtrain.config.sections import Run
from meshtrain.model.transformer import find_lacking
from meshtrain.sharding.rules import Layout


def problems(run: Run, layout: Layout) -> list[str]:
    """Return the reasons why this layout cannot run the model's mixers; empty if it can. Raises: ValueError if code of
    the run's own cannot be loaded."""
    size = layout.sizes["context"]
    return [f"mesh.context={size}: {mixer} gets a part of each sequence, in another order; if it reads other tokens by "
            f"ex.engines only, give its class `context = True`, otherwise use mesh.context=1"
            for mixer in (find_lacking(run.model, "context") if size > 1 else ())]
