"""Built-in rewards: functions (prompt, answer, line) -> 1.0 or 0.0, against a column of the prompt's line.

Imports the standard library alone: workers read this file without the package.
"""
from __future__ import annotations

import re
from fractions import Fraction

NUMBER = re.compile(r"[-−+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:/\d+)?")
BOXED, MARKED = r"\boxed{", "####"
CHOICE = re.compile(r"\(([A-Za-z])\)|\b([A-Z])\b")


def exact(prompt: str, answer: str, line: dict) -> float:
    """Whether the answer is line["answer"], white space around it aside."""
    return float(answer.strip() == str(line["answer"]).strip())


def number(prompt: str, answer: str, line: dict) -> float:
    """Whether the answer's number is that of line["answer"], as fractions: behind the last #### or in the last
    \\boxed{…} if there is one, else the last one."""
    found = last_number(answer)
    return float(found is not None and found == last_number(str(line["answer"])))


def choice(prompt: str, answer: str, line: dict) -> float:
    """Whether the answer's letter is line["answer"]: the last in parentheses, else the last capital that stands
    alone."""
    found = CHOICE.findall(answer) or ([(answer.strip(), "")] if len(answer.strip()) == 1 else [])
    bracketed = [one for one, _ in found if one]
    letter = bracketed[-1] if bracketed else found[-1][1] if found else ""
    return float(letter.upper() == str(line["answer"]).strip().strip("().").upper() != "")


def regex(prompt: str, answer: str, line: dict) -> float:
    """Whether line["pattern"] matches the whole answer, white space around it aside."""
    return float(re.fullmatch(line["pattern"], answer.strip(), re.DOTALL) is not None)


COLUMNS = {"exact": "answer", "number": "answer", "choice": "answer", "regex": "pattern"}


def last_number(text: str) -> Fraction | None:
    if MARKED in text:
        text = text.rsplit(MARKED, 1)[1]
    elif BOXED in text:
        text = text.rsplit(BOXED, 1)[1].split("}", 1)[0]
    for one in reversed([found for found in NUMBER.findall(text) if any(map(str.isdigit, found))]):
        numerator, _, denominator = one.replace(",", "").replace("−", "-").partition("/")
        if denominator and not int(denominator):
            continue
        return Fraction(numerator or "0") / int(denominator or 1)
    return None
