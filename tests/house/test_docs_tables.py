"""Tables of the pages that repeat tables of the program are equal to them: messages, names of other trainers, models."""
import ast
import collections
import json
import re
from pathlib import Path

import pytest
import sources

from meshtrain import run_files
from meshtrain.config import elsewhere
from meshtrain.huggingface import families
from meshtrain.model import transformer

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def tables(page: str) -> list[list[dict[str, str]]]:
    """The tables of a page; a row is a dict from column to cell."""
    blocks = re.findall(r"(?:^\|.*\n)+", (DOCS / page).read_text(), re.MULTILINE)
    lines = [[cells(line) for line in block.splitlines()] for block in blocks]
    return [[dict(zip(head, row, strict=True)) for row in rows] for head, _rule, *rows in lines]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# ---- messages --------------------------------------------------------------------------------------------------------

VALUE = "\N{HORIZONTAL ELLIPSIS}"


def string(node: ast.expr) -> str | None:
    """The text of a string in the source, VALUE for each value in it; None if the node is no string."""
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else VALUE for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


@pytest.fixture(scope="module")
def messages() -> list[str]:
    """The strings of the program that may be messages, each as one line."""
    files = [path for folder in ("meshtrain", "launch") for path in (ROOT / folder).rglob("*.py")]
    found = {string(node) for path in files for node in sources.nodes_of(path.read_text())
             if isinstance(node, ast.Constant | ast.JoinedStr)}
    return [text.replace("\n", " ") for text in found if text and len(text) >= 15]


def printed(message: str, messages: list[str]) -> bool:
    """Whether a string of the program has the constant parts of the message, in their order."""
    parts = [part for part in message.split(VALUE) if part]
    form, longest = re.compile(".*".join(map(re.escape, parts))), max(parts, key=len)
    return any(longest in text and form.search(text) for text in messages)


BY_OTHERS = ("RESOURCE_EXHAUSTED", "NCCL … timed out", "Timed out waiting …ms", "Connection reset by peer")


def test_messages_that_are_explained_are_those_of_the_program(messages):
    quoted = [message for table in tables("troubleshooting.md") for row in table for message in code(row["message"])
              if " " in message and message not in BY_OTHERS]
    assert len(quoted) > 50 and [message for message in quoted if not printed(message, messages)] == []
    assert not printed("checkpoint … is broken", messages)


# ---- names of other trainers -----------------------------------------------------------------------------------------


def test_names_of_other_trainers_are_those_that_messages_know():
    rows = [row for table in tables("coming-from.md") for row in table if "MaxText" in row and "meshtrain" in row
            and "topic" not in row]
    told = {word: code(row["meshtrain"])[0] for row in rows for column, cell in row.items() if column != "meshtrain"
            for word in code(cell)}
    assert told == {word: key for key, words in elsewhere.WORDS.items() for word in words.split()}


# ---- models ----------------------------------------------------------------------------------------------------------


def test_families_are_those_that_are_read_with_their_mixers_experts_and_tests():
    read, wrapped, lacking, _shapes = tables("models.md")[1:]
    settings = [json.loads(path.with_name("config.json").read_text())
                for path in (ROOT / "tests" / "goldens").glob("*/golden.npz")]
    tests = collections.Counter(each.get("text_config", each)["model_type"] for each in settings)

    def row(family: families.Family) -> tuple[str, str, str]:
        parameters = " ".join(text for texts in family.tensors.values() for text in texts)
        latents = " (MLA)" if "layers/attention/latent/" in parameters else ""
        return (", ".join(family.layers.values()) + latents, "yes" if "layers/moe/" in parameters else "",
                str(tests[family.model_type]))

    told = {code(each["`model_type`"])[0]: (each["mixers"], each["experts"], each["tests"]) for each in read}
    assert told == {name: row(family) for name, family in families.FAMILIES.items()}
    assert {code(each["`model_type` of the folder"])[0]: tuple(code(each["text model"]))
            for each in wrapped} == families.MULTIMODAL
    assert f"{len(read)} [families](docs/models.md)" in (ROOT / "README.md").read_text()
    assert {name: each["missing"] for each in lacking for name in code(each["`model_type`"])} == families.LACKING


def test_shapes_are_those_that_are_shipped_with_their_sizes_and_run_files():
    *_, shapes = tables("models.md")
    written = {path.stem: path.read_text() for path in (ROOT / "configs").glob("*.toml")}

    def row(name: str) -> tuple[str, str, list[str]]:
        model = run_files.load([f"--model.preset={name}", "--data.source=tokens", '--data.paths=["none.tokens.npy"]',
                             "--data.bos_token=1"]).model
        size = sum(info.size for info in transformer.build(model).parameters())
        runs = sorted(stem for stem, text in written.items() if f'preset = "{name}"' in text)
        return f"{size / 1e9:.2f}", str(model.num_layers), runs

    told = {code(each["preset"])[0]: (each["parameters, billions"], each["layers"],
                                      re.findall(r"\[([^]]+)\]", each["run files"])) for each in shapes}
    assert told == {name: row(name) for name in run_files.presets()}


# ---- words -----------------------------------------------------------------------------------------------------------


def test_words_of_this_project_are_few_sorted_apart_from_the_fields_and_used_on_other_pages():
    ours, fields = tables("glossary.md")
    pages = " ".join(path.read_text() for path in DOCS.glob("*.md") if path.name != "glossary.md")
    words = [row["word"] for row in ours]
    assert len(words) <= 15 and not set(words) & {row["term"] for row in fields}
    assert [word for word in words if not re.search(rf"\b{word.removesuffix(' axes')}", pages, re.IGNORECASE)] == []
    assert "(glossary.md)" in (DOCS / "README.md").read_text() and "(docs/glossary.md)" in (ROOT / "README.md").read_text()
