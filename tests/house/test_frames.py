"""How far it is from the command to the product of queries and keys: functions and files of ours on the stack."""
import json
import os
import subprocess
import sys
from pathlib import Path

import tiny_run

ROOT = Path(__file__).resolve().parent.parent.parent
MOST_FRAMES, MOST_FILES = 22, 8
SPY = """
import json, sys, traceback
from pathlib import Path
from meshtrain.commands import train
from meshtrain.kernels import blockwise

scores, out, root = blockwise._scores, Path(sys.argv[1]), Path(train.__file__).resolve().parent.parent

def spy(*args):
    if not out.exists():
        stack = [frame for frame in traceback.extract_stack()[:-1] if root in Path(frame.filename).resolve().parents]
        out.write_text(json.dumps([(str(Path(frame.filename).resolve().relative_to(root)), frame.name)
                                   for frame in stack]))
    return scores(*args)
blockwise._scores = spy
sys.exit(train.main(sys.argv[2:]))
"""


def test_few_functions_of_few_files_lie_between_the_command_and_the_scores(tmp_path):
    (tmp_path / "text.txt").write_text("The product of queries and keys. " * 100)
    (tmp_path / "run.toml").write_text(tiny_run.text(
        training__steps=1, mesh__data=1, mesh__simulated_devices=1, data__validation_fraction=0.0,
        data__paths=[str(tmp_path / "text.txt")], metrics__tensorboard=False, run__dir=str(tmp_path / "run")))
    done = subprocess.run([sys.executable, "-c", SPY, str(tmp_path / "frames.json"), str(tmp_path / "run.toml")],
                          cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert (tmp_path / "frames.json").exists(), done.stdout + done.stderr
    frames = json.loads((tmp_path / "frames.json").read_text())
    told = "\n".join(f"{file} {name}" for file, name in frames)
    assert frames[0][0] == "commands/train.py" and frames[-1][0] == "kernels/blockwise.py", told
    assert not any(file.startswith("parallel/pipeline") or file in ("training/executor.py", "training/shard.py")
                   for file, _ in frames), told
    assert len(frames) <= MOST_FRAMES and len({file for file, _ in frames}) <= MOST_FILES, f"{len(frames)}\n{told}"
