"""Built-in rewards: functions (prompt, answer, line) -> 1.0 or 0.0, which compare the answer with a column of the line.

This file imports only the standard library: workers load it without the package.
"""
from __future__ import annotations

import json
import re
from fractions import Fraction

_PLAIN = r"[-−+]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d++)(?:\.\d++)?|\.\d++)"
_BEHIND = r"(?![/\d]|\.\d)"         # accepts 7/2, but no part of 12/25/2024
NUMBER = re.compile(rf"(?<!/){_PLAIN}/\d++(?:\.\d++)?{_BEHIND}|{_PLAIN}")
# \frac{1}{2}, \frac12; and 3\frac{1}{2}, 3 1/2
_ARGUMENT = r"(?:\{\s*([^{}]*?)\s*\}|(\d))"
FRACTION = re.compile(rf"(?:(?<![\d.,])(\d{{1,18}})\s*)?\\[cdt]?frac\s*{_ARGUMENT}\s*{_ARGUMENT}")
MIXED = re.compile(rf"(?<![\d.,/])(\d{{1,18}})[ \t]+(\d{{1,18}})/(\d{{1,18}}){_BEHIND}")
SCIENTIFIC = re.compile(rf"({_PLAIN})(?:\s*[×*·]\s*10\s*"
                        rf"(?:\^\s*(?:\{{\s*([-−+]?\d{{1,3}})\s*\}}|([-−+]?\d{{1,3}})(?!\d))|([⁻⁺]?[⁰¹²³⁴-⁹]{{1,3}}))|"
                        rf"[eE]([-−+]?\d{{1,3}})(?![\w.]))")
# Powers, roots and the like have digits and are no numbers. They become NONE, with the numbers that they are joined to.
NONE, TOO_LONG = "\ue000", "\ue001"
_GROUP = r"(?:\{[^{}]*\}|\([^()]*\))"
_EXPONENT = rf"(?:\s*\^\s*(?:{_GROUP}|[-−+]?(?:\d++|[^\W\d_]))|\*\*(?:{_GROUP}|[-−+]?\d++)|[⁻⁺]?[⁰¹²³⁴-⁹]+)"
POWERS = (re.compile(rf"(\\?[^\W\d_]){_EXPONENT}"),         # of a unit or a variable, which stays: m^2
          re.compile(rf"(?:(?<![\d.]){_PLAIN}|\([^()]*\)|{NONE}){_EXPONENT}"))
OTHERS = re.compile(rf"\\sqrt\s*(?:\[[^][]*\])?\s*(?:{_GROUP}|\d)|[√∛∜]\s*(?:{_GROUP}|[\d.]+)|\bsqrt\s*{_GROUP}|"
                    rf"\\pi\b|π|\\(?:log|ln|exp|sin|cos|tan)\s*(?:_\s*(?:{_GROUP}|\w))?\s*(?:{_GROUP}|{_PLAIN})")
SUBSCRIPT = re.compile(rf"_\s*(?:{_GROUP}|\w)")
JOINED = re.compile(rf"(?:(?<![\d.,]){_PLAIN}\s*+(?:[-−+×*·/]\s*+)?)?{NONE}(?:\s*+[-−+×*·/]\s*+(?:{_PLAIN}|{NONE}))*")
# LaTeX that is removed, or replaced by a character.
PLAINER = ((re.compile(r"\\(?:left|right)\b|\\[,;:! ()\[\]]"), " "), (re.compile(r"\{,\}"), ","),
           (re.compile(r"\\([%$])"), r"\1"), (re.compile(r"\\(?:times|cdot)\b"), "×"),
           (re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree\b"), "°"),
           (re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}"), r" \1 "),
           (re.compile(r"(?<![\w)])([-−+])\s*([$€£¥₹])(?=\s*\.?\d)"), r"\2\1"))
# A gold answer: a number, perhaps with a currency sign, a percent sign or a unit of a few words. No unit begins with a
# word of NO_UNIT.
GOLD = re.compile(rf"[$€£¥₹]?\s*({NUMBER.pattern})((?:[^\W\d_]|[%°/·.\s'’-])*)")
NO_UNIT = {*"xyznabcie", "and", "or", "to", "is", "half", "dozen",
           "hundred", "thousand", "million", "billion", "trillion"}
UNIT_WORDS = 6
BOXED, MARKED = r"\boxed{", "####"
MOST_DIGITS = 1000
CHOICE = re.compile(r"\(([A-Za-z])\)|\b([A-Z])\b")


def exact(prompt: str, answer: str, line: dict) -> float:
    """Return 1.0 if the answer is line["answer"], apart from white space around it, else 0.0."""
    return float(answer.strip() == str(line["answer"]).strip())


def number(prompt: str, answer: str, line: dict) -> float:
    """Return 1.0 if the answer's number equals that of line["answer"], else 0.0. Numbers are compared as fractions.

    The answer's number is after the last ####, else in the last closed \\boxed{…}, else it is the last one.
    \\frac{…}{…} is a number; powers and roots are not.
    """
    last = last_number(answer)
    return float(last is not None and last == gold_number(str(line["answer"])))


def choice(prompt: str, answer: str, line: dict) -> float:
    """Return 1.0 if the answer's letter is line["answer"], else 0.0. The answer's letter is the last one in
    parentheses, else the last single capital."""
    choices = CHOICE.findall(answer) or ([(answer.strip(), "")] if len(answer.strip()) == 1 else [])
    bracketed = [one for one, _ in choices if one]
    letter = bracketed[-1] if bracketed else choices[-1][1] if choices else ""
    return float(letter.upper() == _letter(str(line["answer"])) != "")


def regex(prompt: str, answer: str, line: dict) -> float:
    """Return 1.0 if line["pattern"] matches the whole answer, apart from white space around it, else 0.0."""
    return float(re.fullmatch(line["pattern"], answer.strip(), re.DOTALL) is not None)


def fault(reward: str, line: dict) -> str:
    """Return the fault of the column that the built-in reward reads from this line; empty: none."""
    gold = line[COLUMNS[reward]]
    if gold is None or isinstance(gold, (list, dict)):
        return f"must be a text or a number, but is {json.dumps(gold)[:60]}"
    told = repr(f"…{gold[-60:]}" if len(gold := str(gold).strip()) > 60 else gold)
    if reward == "number" and gold_number(gold) is None:
        return (f"is not one number, but {told}; write an integer, a decimal, a fraction or a percentage, perhaps with "
                f"a unit, alone, after #### or in \\boxed{{…}}")
    if reward == "choice" and not _letter(gold):
        return f"is not one letter, but {told}"
    if reward == "regex":
        try:
            re.compile(line["pattern"])
        except (re.error, TypeError) as error:
            return f"is not a regular expression: {error}"
    return ""


COLUMNS = {"exact": "answer", "number": "answer", "choice": "answer", "regex": "pattern"}


def last_number(text: str) -> Fraction | None:
    """Return the last number of an answer; None if it has none, or if the number has more than MOST_DIGITS digits."""
    for text_of_number in reversed(NUMBER.findall(_plain(_final(text)).rpartition(TOO_LONG)[2])):
        if (value := _value(text_of_number)) is not None:
            return value
    return None


def gold_number(text: str) -> Fraction | None:
    """Return the number of a gold answer; None if it is not one number."""
    match = GOLD.fullmatch(_plain(_final(text)).strip(" \t\r\n$").replace("**", ""))
    words = re.split(r"[\s/·.-]+", match[2].strip()) if match else []
    if not match or len(words) > UNIT_WORDS or words[0].lower() in NO_UNIT or "and" in words:
        return None
    return _value(match[1])


def _final(text: str) -> str:
    """Return the part of a text that contains its number: the text after the last ####, else the content of the last
    closed \\boxed{…}, else the text before an unclosed box, or all of it."""
    if MARKED in text:
        text = text.rsplit(MARKED, 1)[1]
    before, *boxes = text.split(BOXED)
    closed = [inner for box in boxes if (inner := _up_to_its_brace(box)) is not None]
    return closed[-1] if closed else before


def _plain(text: str) -> str:
    """Return a text with each number in the form of NUMBER, and powers, roots and the like as NONE. The time is
    proportional to the length of the text, since no number is longer than MOST_DIGITS."""
    text = re.sub(r"\d++", lambda found: found[0] if len(found[0]) <= MOST_DIGITS else TOO_LONG, text)
    for pattern, plainer in PLAINER:
        text = pattern.sub(plainer, text)
    text = SCIENTIFIC.sub(_of_ten, text)
    before = None
    while text != before:       # a root in a fraction, a power in a root
        before = text
        text = POWERS[1].sub(NONE, POWERS[0].sub(r"\1", text))
        text = MIXED.sub(_rewrite_mixed, FRACTION.sub(_as_fraction, OTHERS.sub(NONE, text)))
    return JOINED.sub(NONE, SUBSCRIPT.sub("", text))


def _value(one: str) -> Fraction | None:
    """Return the value of a match of NUMBER; None if it is divided by zero or has more than MOST_DIGITS digits."""
    numerator, _, denominator = one.replace(",", "").replace("−", "-").partition("/")
    if max(len(numerator), len(denominator)) > MOST_DIGITS:
        return None
    below = Fraction(denominator or 1)
    return Fraction(numerator) / below if below else None


def _of_ten(match: re.Match) -> str:
    """Return 3 × 10^5 or 3e5 as a fraction."""
    number, *exponents = match.groups()
    raised = next(filter(None, exponents)).translate(str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺−", "0123456789-+-"))
    value = _value(number)
    return NONE if value is None else _format_fraction(value * Fraction(10) ** int(raised))


def _as_fraction(match: re.Match) -> str:
    """Return a LaTeX fraction as a/b, and a mixed number 3\\frac{1}{2} as 7/2; NONE if a or b is no number."""
    whole, *parts = match.groups()
    a, b = (first if first is not None else second for first, second in (parts[:2], parts[2:]))
    above, below = (_value(part) if re.fullmatch(_PLAIN, part) else None for part in (a, b))
    if above is None or below is None:
        return NONE
    if not below:
        return f"{a}/{b}"       # divided by zero
    if not whole:
        return _format_fraction(above / below)
    if not (a.isdigit() and b.isdigit()):
        return f"{whole} {NONE}"
    return _format_fraction(int(whole) + above / below)


def _rewrite_mixed(match: re.Match) -> str:
    """Return 3 1/2 as 7/2."""
    whole, a, b = map(int, match.groups())
    return _format_fraction(whole + Fraction(a, b)) if a < b else match[0]


def _format_fraction(value: Fraction) -> str:
    return f"{value.numerator}/{value.denominator}"


def _letter(text: str) -> str:
    """Return the letter of a gold answer, B for (b) or B.; empty if it is not one letter."""
    letter = text.strip().strip("().").upper()
    return letter if len(letter) == 1 and letter.isalpha() else ""


def _up_to_its_brace(text: str) -> str | None:
    """Return the text before the } that closes an already opened {; None if none does."""
    depth = 1
    for i, letter in enumerate(text):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if not depth:
            return text[:i]
    return None
