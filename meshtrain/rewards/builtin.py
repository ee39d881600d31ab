"""Built-in rewards: functions (prompt, answer, line) -> 1.0 or 0.0, against a column of the prompt's line.

Imports the standard library alone: workers read this file without the package.
"""
from __future__ import annotations

import json
import re
from fractions import Fraction

_PLAIN = r"[-−+]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d++)(?:\.\d++)?|\.\d++)"
_BEHIND = r"(?![/\d]|\.\d)"         # 7/2, and no part of 12/25/2024
NUMBER = re.compile(rf"(?<!/){_PLAIN}/\d++(?:\.\d++)?{_BEHIND}|{_PLAIN}")
# \frac{1}{2}, \frac12; and 3\frac{1}{2}, 3 1/2
_ARGUMENT = r"(?:\{\s*([^{}]*?)\s*\}|(\d))"
FRACTION = re.compile(rf"(?:(?<![\d.,])(\d{{1,18}})\s*)?\\[cdt]?frac\s*{_ARGUMENT}\s*{_ARGUMENT}")
MIXED = re.compile(rf"(?<![\d.,/])(\d{{1,18}})[ \t]+(\d{{1,18}})/(\d{{1,18}}){_BEHIND}")
SCIENTIFIC = re.compile(rf"({_PLAIN})(?:\s*[×*·]\s*10\s*"
                        rf"(?:\^\s*(?:\{{\s*([-−+]?\d{{1,3}})\s*\}}|([-−+]?\d{{1,3}})(?!\d))|([⁻⁺]?[⁰¹²³⁴-⁹]{{1,3}}))|"
                        rf"[eE]([-−+]?\d{{1,3}})(?![\w.]))")
# What has digits and is no number: powers, roots and their like become NONE, with the numbers that they are joined to.
NONE, TOO_LONG = "\ue000", "\ue001"
_GROUP = r"(?:\{[^{}]*\}|\([^()]*\))"
_EXPONENT = rf"(?:\s*\^\s*(?:{_GROUP}|[-−+]?(?:\d++|[^\W\d_]))|\*\*(?:{_GROUP}|[-−+]?\d++)|[⁻⁺]?[⁰¹²³⁴-⁹]+)"
POWERS = (re.compile(rf"(\\?[^\W\d_]){_EXPONENT}"),         # of a unit or a variable, which stays: m^2
          re.compile(rf"(?:(?<![\d.]){_PLAIN}|\([^()]*\)|{NONE}){_EXPONENT}"))
OTHERS = re.compile(rf"\\sqrt\s*(?:\[[^][]*\])?\s*(?:{_GROUP}|\d)|[√∛∜]\s*(?:{_GROUP}|[\d.]+)|\bsqrt\s*{_GROUP}|"
                    rf"\\pi\b|π|\\(?:log|ln|exp|sin|cos|tan)\s*(?:_\s*(?:{_GROUP}|\w))?\s*(?:{_GROUP}|{_PLAIN})")
SUBSCRIPT = re.compile(rf"_\s*(?:{_GROUP}|\w)")
JOINED = re.compile(rf"(?:(?<![\d.,]){_PLAIN}\s*+(?:[-−+×*·/]\s*+)?)?{NONE}(?:\s*+[-−+×*·/]\s*+(?:{_PLAIN}|{NONE}))*")
# LaTeX that says nothing, or what a character says.
PLAINER = ((re.compile(r"\\(?:left|right)\b|\\[,;:! ()\[\]]"), " "), (re.compile(r"\{,\}"), ","),
           (re.compile(r"\\([%$])"), r"\1"), (re.compile(r"\\(?:times|cdot)\b"), "×"),
           (re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree\b"), "°"),
           (re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}"), r" \1 "),
           (re.compile(r"(?<![\w)])([-−+])\s*([$€£¥₹])(?=\s*\.?\d)"), r"\2\1"))
# A gold: a number, perhaps of a currency, with a percent sign or a unit of some words; words that no unit begins with.
GOLD = re.compile(rf"[$€£¥₹]?\s*({NUMBER.pattern})((?:[^\W\d_]|[%°/·.\s'’-])*)")
NO_UNIT = {*"xyznabcie", "and", "or", "to", "is", "half", "dozen",
           "hundred", "thousand", "million", "billion", "trillion"}
UNIT_WORDS = 6
BOXED, MARKED = r"\boxed{", "####"
MOST_DIGITS = 1000
CHOICE = re.compile(r"\(([A-Za-z])\)|\b([A-Z])\b")


def exact(prompt: str, answer: str, line: dict) -> float:
    """Whether the answer is line["answer"], white space around it aside."""
    return float(answer.strip() == str(line["answer"]).strip())


def number(prompt: str, answer: str, line: dict) -> float:
    """Whether the answer's number is that of line["answer"], as fractions, \\frac{…}{…} among them: behind the last
    #### or in the last closed \\boxed{…} if there is one, else the last one. Powers and roots are no numbers."""
    found = last_number(answer)
    return float(found is not None and found == gold_number(str(line["answer"])))


def choice(prompt: str, answer: str, line: dict) -> float:
    """Whether the answer's letter is line["answer"]: the last in parentheses, else the last capital that stands
    alone."""
    found = CHOICE.findall(answer) or ([(answer.strip(), "")] if len(answer.strip()) == 1 else [])
    bracketed = [one for one, _ in found if one]
    letter = bracketed[-1] if bracketed else found[-1][1] if found else ""
    return float(letter.upper() == _letter(str(line["answer"])) != "")


def regex(prompt: str, answer: str, line: dict) -> float:
    """Whether line["pattern"] matches the whole answer, white space around it aside."""
    return float(re.fullmatch(line["pattern"], answer.strip(), re.DOTALL) is not None)


def fault(reward: str, line: dict) -> str:
    """The fault of the column of this line that the built-in reward reads; empty: none."""
    gold = line[COLUMNS[reward]]
    if gold is None or isinstance(gold, (list, dict)):
        return f"is no text, but {json.dumps(gold)[:60]}"
    told = repr(f"…{gold[-60:]}" if len(gold := str(gold).strip()) > 60 else gold)
    if reward == "number" and gold_number(gold) is None:
        return (f"is not one number, but {told}; write an integer, a decimal, a fraction or a percentage, perhaps with "
                f"a unit, alone, behind #### or in \\boxed{{…}}")
    if reward == "choice" and not _letter(gold):
        return f"is not one letter, but {told}"
    if reward == "regex":
        try:
            re.compile(line["pattern"])
        except (re.error, TypeError) as error:
            return f"is no regular expression: {error}"
    return ""


COLUMNS = {"exact": "answer", "number": "answer", "choice": "answer", "regex": "pattern"}


def last_number(text: str) -> Fraction | None:
    """The last number of an answer; None without one, or of more than MOST_DIGITS digits."""
    for one in reversed(NUMBER.findall(_plain(_final(text)).rpartition(TOO_LONG)[2])):
        if (value := _value(one)) is not None:
            return value
    return None


def gold_number(text: str) -> Fraction | None:
    """The number of a gold; None if it is not one number."""
    found = GOLD.fullmatch(_plain(_final(text)).strip(" \t\r\n$").replace("**", ""))
    words = re.split(r"[\s/·.-]+", found[2].strip()) if found else []
    if not found or len(words) > UNIT_WORDS or words[0].lower() in NO_UNIT or "and" in words:
        return None
    return _value(found[1])


def _final(text: str) -> str:
    """The part of a text that has its number: behind the last ####, else in the last \\boxed{…} that is closed, else
    all of it up to a box that is not."""
    if MARKED in text:
        text = text.rsplit(MARKED, 1)[1]
    before, *boxes = text.split(BOXED)
    closed = [inner for box in boxes if (inner := _up_to_its_brace(box)) is not None]
    return closed[-1] if closed else before


def _plain(text: str) -> str:
    """A text in which each number is as NUMBER has it, and what only has digits (powers, roots) is NONE. Takes a time
    in proportion to the text's length: no number is longer than MOST_DIGITS."""
    text = re.sub(r"\d++", lambda found: found[0] if len(found[0]) <= MOST_DIGITS else TOO_LONG, text)
    for pattern, plainer in PLAINER:
        text = pattern.sub(plainer, text)
    text = SCIENTIFIC.sub(_of_ten, text)
    before = None
    while text != before:       # a root in a fraction, a power in a root
        before = text
        text = POWERS[1].sub(NONE, POWERS[0].sub(r"\1", text))
        text = MIXED.sub(_mixed, FRACTION.sub(_as_fraction, OTHERS.sub(NONE, text)))
    return JOINED.sub(NONE, SUBSCRIPT.sub("", text))


def _value(one: str) -> Fraction | None:
    """The value of a match of NUMBER; None where it is divided by zero or has more than MOST_DIGITS digits."""
    numerator, _, denominator = one.replace(",", "").replace("−", "-").partition("/")
    if max(len(numerator), len(denominator)) > MOST_DIGITS:
        return None
    below = Fraction(denominator or 1)
    return Fraction(numerator) / below if below else None


def _of_ten(found: re.Match) -> str:
    """3 × 10^5 or 3e5 as a fraction."""
    number, *exponents = found.groups()
    raised = next(filter(None, exponents)).translate(str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺−", "0123456789-+-"))
    value = _value(number)
    return NONE if value is None else _written(value * Fraction(10) ** int(raised))


def _as_fraction(found: re.Match) -> str:
    """A LaTeX fraction as a/b; a mixed number 3\\frac{1}{2} as 7/2; NONE where a or b is no number."""
    whole, *parts = found.groups()
    a, b = (first if first is not None else second for first, second in (parts[:2], parts[2:]))
    values = [_value(part) if re.fullmatch(_PLAIN, part) else None for part in (a, b)]
    if None in values or not values[1]:
        return NONE if None in values else f"{a}/{b}"       # divided by zero
    if not whole:
        return _written(values[0] / values[1])
    if not (a.isdigit() and b.isdigit()):
        return f"{whole} {NONE}"
    return _written(int(whole) + values[0] / values[1])


def _mixed(found: re.Match) -> str:
    """3 1/2 as 7/2."""
    whole, a, b = map(int, found.groups())
    return _written(whole + Fraction(a, b)) if a < b else found[0]


def _written(value: Fraction) -> str:
    return f"{value.numerator}/{value.denominator}"


def _letter(text: str) -> str:
    """The letter of a choice's gold, B of (b) or B.; empty if it is not one."""
    letter = text.strip().strip("().").upper()
    return letter if len(letter) == 1 and letter.isalpha() else ""


def _up_to_its_brace(text: str) -> str | None:
    """The text before the } that closes an already opened {; None if none does."""
    depth = 1
    for i, letter in enumerate(text):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if not depth:
            return text[:i]
    return None
