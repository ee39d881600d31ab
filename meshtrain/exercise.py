"""Checks answers to the questions in the notebooks."""
from __future__ import annotations

import math
from typing import Any


def check_answer(answer: Any, right: Any, hint: str, tolerance: float = 0.01) -> None:
    """Print whether an answer is right. `...` means that there is no answer yet.

    Numbers may differ by the relative tolerance; other values must be equal. Raises: AssertionError with the hint.

    >>> mt.check_answer(..., 7 / 8, "a ring of 8 passes each piece on 7 times")
    no answer yet: put yours in place of the dots, and run this cell again
    >>> mt.check_answer(0.875, 7 / 8, "a ring of 8 passes each piece on 7 times")
    right
    """
    if answer is ...:
        print("no answer yet: put yours in place of the dots, and run this cell again")
        return
    try:
        correct = math.isclose(float(answer), float(right), rel_tol=tolerance)
    except (TypeError, ValueError):
        correct = answer == right
    assert correct, f"{answer!r} is not right. Hint: {hint}"
    print("right")
