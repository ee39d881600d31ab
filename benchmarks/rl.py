"""python benchmarks/rl.py [--seeds N]: what the quickstart of learning from rewards learns, with seeds and controls.

Every seed takes the demonstrations, half of which are wrong, and then learns from three rewards: for reversed words, for
copied ones, and by a coin that knows nothing. The share of reversed words among answers to held-out words must rise,
vanish, and not rise. The first of them also runs on eight simulated devices, and has the same rewards step by step
until the two runs' weights, which round otherwise in each step, decide one draw differently. Writes benchmarks/rl.md.
"""
from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
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
    """Says nothing of what is right, and is a function of the answer all the same."""
    return reversals(prompt, answer, line) | {"reward": hashlib.blake2b((prompt + answer).encode()).digest()[0] % 2}


def run(name: str, *keys: str) -> float:
    """Seconds of processor time of the command."""
    begun = os.times()
    subprocess.run([sys.executable, "-m", "meshtrain.train", f"configs/{name}.toml", *keys], check=True, cwd=ROOT,
                   stdout=subprocess.DEVNULL, env={**os.environ, "NPROC": "32"})
    ended = os.times()
    return ended.children_user + ended.children_system - begun.children_user - begun.children_system


def rows(directory: str) -> list[dict]:
    return [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]


def main(argv=None) -> int:
    parser = words.Parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="how many (3)")
    seeds, lines, same = parser.parse_args(argv).seeds, [], []
    with tempfile.TemporaryDirectory() as place:
        for seed in range(seeds):
            sft = f"{place}/sft{seed}"
            cpu = run("quickstart-rl-sft", f"--run.dir={sft}", f"--run.seed={seed}")
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
                    same.append(sum(one["reward"] == other["reward"] for one, other in zip(
                        found, rows(f"{directory}-8"), strict=True)) / len(found))
    (ROOT / "benchmarks" / "rl.md").write_text(f"""# What is learned from rewards

{machine.line("", "jax", "jaxlib")}

{__doc__.split(chr(10) * 2)[1].strip()}

| seed | reward | reversed before | reversed after, of 512 held-out words | step with 0.95 | seconds | of processors |
|---|---|---|---|---|---|---|
""" + "\n".join(lines) + f"""

Steps whose mean reward is the same on eight simulated devices (data 2 × fsdp 2 × tensor 2) to the last bit, of each seed:
{", ".join(f"{share:.0%}" for share in same)}.
""", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
