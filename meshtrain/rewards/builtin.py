"""Built-in rewards: functions (prompt, answer, line) -> 1.0 or 0.0, against a column of the prompt's line.

Imports the standard library alone: workers read this file without the package.
"""
from __future__ import annotations

import re
from fractions import Fraction

_PLAIN = r"[-−+]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
NUMBER = re.compile(rf"(?<!/){_PLAIN}/\d+(?![/\d]|\.\d)|{_PLAIN}")         # 7/2, and no part of 12/25/2024
FRACTION = re.compile(r"(?:(\d{1,18})\s*)?\\[dt]?frac\s*\{\s*([^{}]*?)\s*\}\s*\{\s*([^{}]*?)\s*\}")
BOXED, MARKED = r"\boxed{", "####"
MOST_DIGITS = 1000
CHOICE = re.compile(r"\(([A-Za-z])\)|\b([A-Z])\b")


def exact(prompt: str, answer: str, line: dict) -> float:
    """Whether the answer is line["answer"], white space around it aside."""
    return float(answer.strip() == str(line["answer"]).strip())


def number(prompt: str, answer: str, line: dict) -> float:
    """Whether the answer's number is that of line["answer"], as fractions, \\frac{…}{…} among them: behind the last
    #### or in the last \\boxed{…} if there is one, else the last one."""
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


def fault(reward: str, line: dict) -> str:
    """What is wrong with the column of this line that the built-in reward reads; empty: nothing."""
    if reward != "regex":
        return ""
    try:
        re.compile(line["pattern"])
    except (re.error, TypeError) as error:
        return f"is no regular expression: {error}"
    return ""


COLUMNS = {"exact": "answer", "number": "answer", "choice": "answer", "regex": "pattern"}


def last_number(text: str) -> Fraction | None:
    text = FRACTION.sub(_as_fraction, text)
    if MARKED in text:
        text = text.rsplit(MARKED, 1)[1]
    elif BOXED in text:
        text = _up_to_its_brace(text.rsplit(BOXED, 1)[1])
    for one in reversed(NUMBER.findall(text)):
        numerator, _, denominator = one.replace(",", "").replace("−", "-").partition("/")
        if max(len(numerator), len(denominator)) > MOST_DIGITS:
            return None
        if denominator and not int(denominator):
            continue
        return Fraction(numerator) / int(denominator or 1)
    return None


def _as_fraction(found: re.Match) -> str:
    """A LaTeX fraction as a/b; a mixed number 3\\frac{1}{2} as 7/2."""
    whole, a, b = found.groups()
    if not whole:
        return f"{a}/{b}"
    if not (a.isascii() and a.isdigit() and b.isascii() and b.isdigit() and max(len(a), len(b)) <= MOST_DIGITS):
        return f"{whole} {a}/{b}"
    return f"{int(whole) * int(b) + int(a)}/{b}"


def _up_to_its_brace(text: str) -> str:
    """The text before the } that closes an already opened {."""
    depth = 1
    for i, letter in enumerate(text):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if not depth:
            return text[:i]
    return text
