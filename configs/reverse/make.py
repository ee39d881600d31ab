"""Writes the data of quickstart-rl-sft and quickstart-rl: python configs/reverse/make.py.

Demonstrations: words of four different letters, every second one reversed, the others copied. Prompts: half of these
words, with the reversed word as the answer; held out: words that no demonstration has.
"""
import gzip
import io
import json
import random
import string
from pathlib import Path

LENGTH, TRAINED, HELD_OUT = 4, 8192, 512


def write(name: str, lines: list[dict]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    content = io.BytesIO()
    with gzip.GzipFile(fileobj=content, mode="wb", compresslevel=9, mtime=0) as file:
        file.write(text)
    (Path(__file__).parent / f"{name}.jsonl.gz").write_bytes(content.getvalue())


def main() -> None:
    draw, words = random.Random(0), {}
    while len(words) < TRAINED + HELD_OUT:
        words["".join(draw.sample(string.ascii_lowercase, LENGTH))] = None
    held, trained = list(words)[:HELD_OUT], list(words)[HELD_OUT:]

    def prompt(word: str) -> dict[str, str]:
        return {"prompt": f"{word}=", "answer": word[::-1]}
    write("demonstrations", [{"text": f"{word}={word[::-1] if i % 2 else word}"} for i, word in enumerate(trained)])
    write("prompts", list(map(prompt, trained[:TRAINED // 2])))
    write("held_out", list(map(prompt, held)))


if __name__ == "__main__":
    main()
