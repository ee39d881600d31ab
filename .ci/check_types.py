"""python .ci/check_types.py [--write]: mypy's errors by file may fall and not rise.

What it found when the table was last written is in .ci/types.json. Packages are taken as untyped, so that the count is
the same in every environment.
"""
import collections
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / ".ci" / "types.json"


def count_errors() -> tuple[dict[str, int], list[str]]:
    """(errors by file, mypy's lines)."""
    done = subprocess.run([sys.executable, "-m", "mypy", "--no-site-packages", "--ignore-missing-imports",
                           "--python-version", "3.11", "meshtrain", "launch"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode > 1:
        raise SystemExit(f"mypy ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    lines = [line for line in done.stdout.splitlines() if re.match(r"[^:]+:\d+: error: ", line)]
    return dict(sorted(collections.Counter(line.partition(":")[0] for line in lines).items())), lines


def main() -> int:
    found, lines = count_errors()
    if "--write" in sys.argv[1:]:
        TABLE.write_text(json.dumps(found, indent=1) + "\n")
    known = json.loads(TABLE.read_text())
    worse = [name for name, count in found.items() if count > known.get(name, 0)]
    for name in worse:
        print(f"{name}: {found[name]} errors of types, {known.get(name, 0)} in .ci/types.json:")
        print("\n".join(line for line in lines if line.startswith(f"{name}:")))
    print(f"types: {sum(found.values())} errors, {sum(known.values())} in .ci/types.json")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
