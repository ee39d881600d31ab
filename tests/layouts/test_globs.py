"""Which files data.paths names: those that glob finds, each once by its real name, with few calls to the system."""
import glob
import os
import random

import pytest

from meshtrain import config
from meshtrain.data import globs, sources

PATTERNS = ["**", "**/*.txt", "*/**/*.txt", "a/**/b.txt", "**/a/*", "a/**", "**/a/**/*.txt",
            "*.txt", "[ab]/*", "**/.h/*.txt", "nothing/**", "./**/b.txt"]


def tree(root, seed: int):
    rng, folders = random.Random(seed), [root]
    for _ in range(12):
        folders.append(rng.choice(folders) / rng.choice(["a", "b", "c[1]", ".h"]))
        folders[-1].mkdir(exist_ok=True)
    for folder in folders:
        for name in rng.sample(["a.txt", "b.txt", ".c.txt", "d"], 2):
            (folder / name).write_text(name)
    (root / "elsewhere").mkdir()
    (root / "elsewhere" / "b.txt").write_text("")
    for name, target in (("link", root / "elsewhere"), ("link.txt", root / "elsewhere" / "b.txt"),
                         ("gone.txt", root / "none")):
        (rng.choice(folders) / name).symlink_to(target)


def test_what_is_found_is_what_glob_finds(tmp_path, monkeypatch):
    for seed in range(8):
        root = tmp_path / str(seed)
        root.mkdir()
        tree(root, seed)
        monkeypatch.chdir(root)
        for pattern in PATTERNS + [str(root / one) for one in PATTERNS]:
            mine = {os.path.normpath(path) for path in globs.expand(pattern) if not os.path.isdir(path)}
            assert mine == {os.path.normpath(path) for path in glob.glob(pattern, recursive=True)
                            # `a/` of a file a is none
                            if os.path.lexists(path) and not os.path.isdir(path)}, pattern
            real = globs.resolver()
            assert all(real(path) == os.path.realpath(path) for path in mine)


def test_links_that_lead_round_in_circles_are_followed_once(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "x.txt").write_text("x")
    for k in range(5):
        (tmp_path / "a" / f"up{k}").symlink_to(tmp_path)
        (tmp_path / "a" / "b" / f"here{k}").symlink_to(".")
    assert list(globs.match_globs([str(tmp_path / "**" / "*.txt")])) == [str(tmp_path / "a" / "b" / "x.txt")]


def test_a_file_costs_no_call_for_each_directory_above_it(tmp_path, monkeypatch):
    folder = tmp_path / "a" / "b" / "c" / "d"
    folder.mkdir(parents=True)
    for i in range(50):
        (folder / f"{i}.txt").write_text("x")
    looked, real = [], os.lstat
    monkeypatch.setattr(os, "lstat", lambda path, **options: looked.append(path) or real(path, **options))
    described = sources.describe(config.Data(source="text", paths=[str(tmp_path / "**" / "*.txt")]), vocab_size=512)
    assert len(described.components[0].paths) == 50 and len(looked) < 70


@pytest.mark.parametrize("linked", [False, True])
def test_files_to_validate_on_that_are_trained_on_are_told_by_any_name(linked, tmp_path):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.txt").symlink_to("a.txt")
    data = config.Data(source="text", paths=[str(tmp_path / "a.txt")],
                       validation_paths=[str(tmp_path / ("b.txt" if linked else "a.txt"))])
    with pytest.raises(ValueError, match="is also training data"):
        sources.describe(data, vocab_size=512)
