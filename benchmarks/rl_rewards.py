"""Rewards of benchmarks.rl: of the quickstart, and of its controls. Each tells besides how many answers are reversed words."""


def reversed_(line, answer):
    return answer.strip() == line["answer"]


def reversals(prompt, answer, line):
    return {"reward": reversed_(line, answer), "reversed": reversed_(line, answer)}


def copies(prompt, answer, line):
    return {"reward": answer.strip() == line["answer"][::-1], "reversed": reversed_(line, answer)}


def coin(prompt, answer, line):
    """Says nothing of what is right, and is a function of the answer all the same."""
    import hashlib
    return {"reward": hashlib.blake2b((prompt + answer).encode()).digest()[0] % 2, "reversed": reversed_(line, answer)}
