"""python benchmarks/rl.py [--seeds N] [--only words|sums]: what is learned from rewards, with seeds and controls.

Writes benchmarks/rl.md, or the part of it that is asked for.

Words. With every seed, a run learns the demonstrations of the quickstart, half of which are wrong. From its weights,
three runs learn with different rewards: one for reversed words, one for copied words, and a coin that is independent of
the answer. The share of reversed words among the answers to held-out words must rise with the first reward, vanish with
the second and not rise with the third. The first run is repeated on eight simulated devices. It has the same rewards in
each step until rounding, which differs between the two runs, changes a sampled token.

Sums. The byte model of the quickstart adds numbers of three digits, column by column: "548+858=16 10 14 #### 1406". The
demonstrations have an error of one in every fifth column. So half of them are wrong, and training on more of them does
not help. From the weights after the demonstrations, one run learns with the built-in reward `number`, which reads only
the last number of an answer, on sums without demonstrations. Another run continues with demonstrations for as many CPU
seconds, including compilation. Then answers are sampled at temperature 1 for sums that neither run saw. The table has
the share of right answers, and the share of sums for which at least one of eight answers is right.
"""
from __future__ import annotations

import hashlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import machine, words

REWARDS = ("reversals", "copies", "coin")
EIGHT = ("--mesh.data=2", "--mesh.fsdp=2", "--mesh.tensor=2", "--mesh.simulated_devices=8",
         "--sharding.rules=sharding_rules/zero3.toml")


def reversals(prompt, answer, line):
    return {"reward": answer.strip() == line["answer"], "reversed": answer.strip() == line["answer"]}


def copies(prompt, answer, line):
    return reversals(prompt, answer, line) | {"reward": answer.strip() == line["answer"][::-1]}


def coin(prompt, answer, line):
    """Return a reward that says nothing about correctness but is a function of the answer."""
    return reversals(prompt, answer, line) | {"reward": hashlib.blake2b((prompt + answer).encode()).digest()[0] % 2}


def run(name: str, *keys: str) -> float:
    """Run the command. Return its CPU seconds."""
    begun = os.times()
    subprocess.run([sys.executable, "-m", "meshtrain.train", f"configs/{name}.toml", *keys], check=True, cwd=ROOT,
                   stdout=subprocess.DEVNULL, env={**os.environ, "NPROC": "32"})
    ended = os.times()
    return ended.children_user + ended.children_system - begun.children_user - begun.children_system


def rows(directory: str) -> list[dict]:
    return [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]


# ---- words -----------------------------------------------------------------------------------------------------------

def words_learned(place: str, seed: int) -> tuple[list[str], float]:
    """Return the rows of the table, and the share of steps with the same reward on eight devices."""
    sft = f"{place}/sft{seed}"
    cpu, lines, same = run("quickstart-rl-sft", f"--run.dir={sft}", f"--run.seed={seed}"), [], 0.0
    lines.append(f"| {seed} | demonstrations | | | | {rows(sft)[-1]['elapsed_s']:.0f} | {cpu:.0f} |")
    for reward in REWARDS:
        begun, directory = time.perf_counter(), f"{place}/{reward}{seed}"
        keys = (f"--run.dir={directory}", f"--run.seed={seed}", f"--checkpoint.init_from={sft}",
                f"--rl.reward=benchmarks/rl.py:{reward}")
        cpu, taken = run("quickstart-rl", *keys), time.perf_counter() - begun
        found = rows(directory)
        at = [(row["step"], row["val_reward/reversed"]) for row in found if "val_reward" in row]
        reached = next((str(step) for step, value in at if value >= 0.95), "–")
        error = (at[-1][1] * (1 - at[-1][1]) / 512) ** 0.5
        lines.append(f"| {seed} | {reward} | {found[0]['reward/reversed']:.3f} | {at[-1][1]:.3f} ± {error:.3f} | "
                     f"{reached} | {taken:.0f} | {cpu:.0f} |")
        print(lines[-1], flush=True)
        if reward == "reversals":
            run("quickstart-rl", f"--run.dir={directory}-8", *keys[1:], *EIGHT)
            same = sum(one["reward"] == other["reward"] for one, other in zip(
                found, rows(f"{directory}-8"), strict=True)) / len(found)
    return lines, same


def of_words(place: str, seeds: int) -> str:
    found = [words_learned(place, seed) for seed in range(seeds)]
    table = "\n".join(line for lines, _ in found for line in lines)
    return f"""
| seed | reward | reversed before | reversed after, of 512 held-out words | first step with reward ≥ 0.95 | seconds | CPU seconds |
|---|---|---|---|---|---|---|
{table}

Share of steps whose mean reward on eight simulated devices (data 2 × fsdp 2 × tensor 2) is the same to the last bit, for
each seed: {", ".join(f"{share:.0%}" for _, share in found)}.
"""


# ---- sums ------------------------------------------------------------------------------------------------------------

SUMS, HELD_OUT, WRONG, STEPS = 8192, 256, 0.2, 300
ROWS = "--data.seq_len=216"         # eight sums
LEARN = (ROWS, "--rl.reward=number", "--rl.max_tokens=20", "--validation.every=0")


def worked(a: int, b: int, chance: random.Random) -> str:
    """Return a demonstration of a sum: the columns from the last one, with the carry, and the resulting number."""
    columns, carried = [], 0
    for place in (1, 10, 100):
        column = a // place % 10 + b // place % 10 + carried
        if chance.random() < WRONG:
            column = min(max(column + chance.choice((-1, 1)), 0), 19)
        columns.append(column)
        carried = column // 10
    said = " ".join(f"{column:02d}" for column in columns)
    return f"{said} #### {columns[2] * 100 + columns[1] % 10 * 10 + columns[0] % 10}"


def write_sums(place: str) -> float:
    """Write demonstrations.jsonl, prompts.jsonl and held_out.jsonl, with no sum in two of them. Return the share of
    correct demonstrations."""
    chance, right = random.Random(0), 0
    drawn = [(100 + n // 900, 100 + n % 900) for n in chance.sample(range(900 * 900), 2 * SUMS + HELD_OUT)]
    with open(f"{place}/demonstrations.jsonl", "w") as file:
        for a, b in drawn[:SUMS]:
            text = worked(a, b, chance)
            right += text.endswith(f" {a + b}")
            file.write(json.dumps({"text": f"{a}+{b}={text}"}) + "\n")
    for name, some in (("prompts", drawn[SUMS:2 * SUMS]), ("held_out", drawn[2 * SUMS:])):
        Path(f"{place}/{name}.jsonl").write_text("".join(
            json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a, b in some))
    return right / SUMS


def sums_right(place: str, weights: str) -> tuple[float, float, float]:
    """Return (share of right answers to held-out sums, its standard error, share of sums with at least one right answer
    of eight). The first batch of a run is sampled with its initial weights."""
    run("quickstart-rl", f"--run.dir={weights}-asked", f'--data.paths=["{place}/held_out.jsonl"]',
        "--data.validation_paths=[]", f"--checkpoint.init_from={weights}", *LEARN, f"--rl.prompts={HELD_OUT}",
        "--training.steps=1", "--data.global_batch=512", "--training.microbatches=32")
    of: dict[str, list[float]] = {}
    for line in Path(f"{weights}-asked/rollouts/0.jsonl").read_text().splitlines():
        one = json.loads(line)
        of.setdefault(one["prompt"], []).append(one["reward"])
    means = [sum(rewards) / len(rewards) for rewards in of.values()]
    mean = sum(means) / len(means)
    error = (sum((one - mean) ** 2 for one in means) / (len(means) - 1) / len(means)) ** 0.5
    return mean, error, sum(map(any, of.values())) / len(of)


def sums_learned(place: str, seed: int) -> str:
    """Return a row of the table."""
    shown = (ROWS, f'--data.paths=["{place}/demonstrations.jsonl"]', f"--run.seed={seed}", "--validation.every=0")
    first, learned, more = (f"{place}/{name}{seed}" for name in ("first", "learned", "more"))
    cpu_s = run("quickstart-rl-sft", f"--run.dir={first}", f"--training.steps={STEPS}", *shown)
    learned_s = run("quickstart-rl", f"--run.dir={learned}", f'--data.paths=["{place}/prompts.jsonl"]',
                    "--data.validation_paths=[]", f"--run.seed={seed}", f"--checkpoint.init_from={first}", *LEARN)
    steps = round(STEPS * learned_s / cpu_s)
    more_s = run("quickstart-rl-sft", f"--run.dir={more}", f"--training.steps={steps}",
                 f"--checkpoint.init_from={first}", *shown)
    before, after, control = (sums_right(place, weights) for weights in (first, learned, more))

    def cells(of: Sequence[float]) -> str:
        return f"{of[0]:.3f} ± {of[1]:.3f} | {of[2]:.3f}"
    line = (f"| {seed} | {cells(before)} | {cells(after)} | {learned_s:.0f} | {cells(control)} | {more_s:.0f} | "
            f"{100 * (after[0] - control[0]):+.0f} |")
    print(line, flush=True)
    return line


def of_sums(place: str, seeds: int) -> str:
    right = write_sums(place)
    table = "\n".join(sums_learned(place, seed) for seed in range(seeds))
    return f"""
{right:.1%} of {SUMS:,} demonstrations are right. Training takes {STEPS} steps on demonstrations, then 80 steps of 32 sums × 8 answers.
The test has {HELD_OUT} other sums × 8 answers.

| seed | right after demonstrations | one of 8 | right after rewards | one of 8 | CPU seconds | right after more demonstrations | one of 8 | CPU seconds | difference, points |
|---|---|---|---|---|---|---|---|---|---|
{table}
"""


PARTS = {"words": ("Reversed words", of_words), "sums": ("Sums", of_sums)}


def main(argv=None) -> int:
    parser = words.Parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="how many (3)")
    parser.add_argument("--only", choices=PARTS, help="one of the two")
    asked, path = parser.parse_args(argv), ROOT / "benchmarks" / "rl.md"
    _, *sections = re.split(r"(?m)^## ", path.read_text(encoding="utf-8"))
    kept = {section.partition("\n")[0]: section.partition("\n")[2].strip() for section in sections}
    about = [part.partition(". ")[2] for part in __doc__.strip().split("\n\n")[2:]]
    for (name, (title, measure)), text in zip(PARTS.items(), about, strict=True):
        if asked.only in (None, name):
            with tempfile.TemporaryDirectory() as place:
                kept[title] = f"{machine.line('', 'jax', 'jaxlib')}\n\n{text}\n{measure(place, asked.seeds)}".strip()
            path.write_text("# What is learned from rewards\n" + "".join(
                f"\n## {title}\n\n{kept[title]}\n" for title, _ in PARTS.values() if title in kept), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
