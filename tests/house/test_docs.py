"""The pages say what is so: their commands parse, their links and files exist, their keys are keys."""
import builtins
import fnmatch
import json
import math
import re
import shlex
import traceback
from pathlib import Path

import jax
import numpy as np
import pytest
import sources
from safetensors.numpy import save_file

from meshtrain.launch import elastic, local, pod, restart, samplers
from meshtrain import assembly, config, run_files
from meshtrain.commands import (
    check, convert, evaluate, generate, inspect, plan, prove, report, sample, slurm, tokenize,
)
from meshtrain.checkpoint import resume
from meshtrain.cost.program import compile as gpu_compile
from meshtrain.kernels import blockwise

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EACH = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
COMMANDS = {door.COMMAND.module: door for door in (check, convert, evaluate, generate, inspect,
                                                   plan, prove, report, sample, slurm, tokenize, elastic,
                                                   local, pod, restart, samplers)}


# As published with the model: the shipped run file of this shape must not contradict it.
LLAMA_1B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192, "rms_norm_eps": 1e-05,
    "tie_word_embeddings": True,
    "rope_theta": 500000.0, "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                                             "original_max_position_embeddings": 8192, "rope_type": "llama3"}}


def commands(page: Path) -> list[str]:
    """What a reader would paste: the lines of the blocks of bash, those that end in \\ joined with the next, the
    commands that stand whole in the text, and those above what they printed; `meshtrain X` as `python -m meshtrain.X`."""
    text = page.read_text()
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    inline = re.findall(r"`((?:python -m|meshtrain [a-z]+) [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    printed = re.findall(r"^\$ (meshtrain .*)\n(?!error:)", text, re.MULTILINE)
    lines = [part.partition(" > ")[0].strip() for line in [*blocks.splitlines(), *inline, *printed] for part in line.split("&&")]
    as_module = re.compile(r"^(?:meshtrain (launch )?|python -m (launch)\.)(\w+)")
    return [as_module.sub(lambda found: f"python -m {'meshtrain.launch' if found[1] or found[2] else 'meshtrain'}.{found[3]}", line)
            for line in lines if line]


def find_run_files(page: Path) -> dict[str, str]:
    """Name -> text of the run files, and of the files of one's own code, that a page shows whole: blocks of TOML and Python
    that begin with their name."""
    return dict(re.findall(r"```(?:toml|python)\n# ([\w-]+\.(?:toml|py))\n(.*?)```", page.read_text(), re.DOTALL))


@pytest.fixture
def as_a_user(tmp_path, monkeypatch):
    """A directory with what the pages take for given: a finished run, a rule file of one's own, a model folder, the run
    files that a page shows."""
    monkeypatch.chdir(tmp_path)
    for name, text in {name: text for page in PAGES for name, text in find_run_files(page).items()}.items():
        (tmp_path / name).write_text(text)
    for run in ("quickstart", "sft", "quickstart-rl-sft"):
        (tmp_path / "runs" / run).mkdir(parents=True)
    (tmp_path / "my_rules.toml").touch()
    (tmp_path / "RUN.toml").write_text('[data]\nsource = "stdlib"\n')
    for name in ("Llama-3.2-1B", "Llama-3.1-8B-Instruct"):      # of the second, only that it has the same vocabulary
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(LLAMA_1B))
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 1, "lora_alpha": 1}')
    save_file({f"base_model.model.model.layers.0.self_attn.q_proj.lora_{one}.weight": np.ones(shape, "float32")
               for one, shape in (("A", (1, 2048)), ("B", (2048, 1)))},
              tmp_path / "adapters" / "adapter_model.safetensors")


@EACH
def test_commands_have_options_that_are_there_and_files_that_exist(page, as_a_user, capsys):
    for line in commands(page):
        module, *argv = (shlex.split(line, comments=True)[2:] if re.search(r"\bpython -m ", line) else [""])
        if module in COMMANDS and argv and "--help" not in argv:
            asked = COMMANDS[module].COMMAND.read(argv)
            if module == "meshtrain.plan":
                assert plan.run_of(asked).mesh.data == 1
            elif module in ("meshtrain.check", "meshtrain.inspect", "meshtrain.prove", "meshtrain.slurm", "meshtrain.tokenize") or module.startswith("meshtrain.launch."):
                run_files.load([*asked.names, *asked.keys, *asked.run])
            if asked.values.get("topology"):
                assert gpu_compile.parse_topology(asked["topology"])
        elif module == "meshtrain.train" and "--help" not in argv:
            if not (argv and argv[0].startswith("s3://")):      # a run's own file in its bucket
                run_files.load(argv)
        else:
            assert module in ("", "pytest") or (
                ROOT / f"{module.replace('meshtrain.launch', 'launch').replace('.', '/')}.py").is_file(), line


@EACH
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


@EACH
def test_shipped_files_that_are_named_exist(page):
    named = re.findall(r"\b(?:configs|sharding_rules|launch|benchmarks|notebooks|tests|meshtrain)/[\w./-]*\w",
                       page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


@EACH
def test_keys_that_are_named_are_keys(page):
    sections = "|".join(config.SECTIONS)
    found = re.findall(rf"(?:`|--)({sections})\.(\w+)", page.read_text())
    assert [f"{section}.{key}" for section, key in found
            if key not in config.SECTIONS[section].model_fields and key not in ("py", "jsonl", "aside")] == []


def test_every_page_is_on_the_map_and_the_first_page_is_short():
    text, guide = PAGES[0].read_text(), (ROOT / "docs" / "README.md").read_text()
    assert len(text.splitlines()) <= 120 and "(docs/README.md)" in text
    pages = [page.name for page in PAGES[1:] if page.name != "README.md"]
    assert [name for name in pages if f"]({name})" not in guide] == []


def test_the_table_of_layouts_has_every_rule_file():
    text = PAGES[0].read_text()
    shipped = {path.stem for path in (ROOT / "sharding_rules").glob("*.toml")}
    named = set(re.findall(r"`(\w+)`",
                           "\n".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| `"))))
    assert named - {"context", "stage"} == shipped      # `tensor` is a rule file and an axis


def test_what_may_change_on_resume_is_what_the_page_says():
    table = [line.split("|")[1:3] for line in (ROOT / "docs" / "resume.md").read_text().splitlines()
             if line.startswith("| `")]
    words = {resume.STAYS: "another run", resume.CONTENT: "compared by content",
             resume.RECORDED: "used from the next step on",
             resume.FREE: "used, and not recorded"}
    told = {}
    for keys, meaning in table:
        (kind,) = [kind for kind, start in words.items() if meaning.strip().startswith(start)]
        told |= dict.fromkeys(re.findall(r"`(\w+\.[\w*]+)`", keys), kind)

    def narrowest(key):
        return told[max((pattern for pattern in told if fnmatch.fnmatchcase(key, pattern)), key=len)]

    names = [f"{section}.{key}" for section, cls in config.SECTIONS.items() for key in cls.model_fields]
    assert {name: resume.rule(name) for name in names if narrowest(name) != resume.rule(name)} == {} and len(table) == 4


def test_the_command_of_ci_is_that_of_the_first_page():
    block = PAGES[0].read_text().split("<!-- test-command -->")[1].split("```")[1]
    assert block.startswith("bash\n") and block.count("\n") == 2 and "pytest" in block and ".venv/" in block


CODE = ROOT / "docs" / "code.md"


def listed(form: str) -> list[tuple[str, str]]:
    """(file below meshtrain/, the text after it) of the items of the page of the code that begin with `form`."""
    found = re.findall(rf"^{form} \[meshtrain/(\S+)\]\(\S+\)(.*(?:\n   ? ?\S.*)*)", CODE.read_text(), re.MULTILINE)
    return [(path, text) for path, text in found]


@pytest.mark.parametrize("stages", [1, 2])
def test_the_page_of_the_code_leads_to_the_scores_by_the_files_that_a_step_passes(stages, monkeypatch):
    stacks, scores = [], blockwise._scores
    monkeypatch.setattr(blockwise, "_scores", lambda *args, **words: stacks.append(traceback.extract_stack())
                        or scores(*args, **words))
    run = config.Run(model=dict(num_layers=2, embed_dim=16, num_heads=2, mlp_dim=16), mesh=dict(stage=stages),
                     data=dict(seq_len=16, global_batch=2), training=dict(microbatches=2))
    made = assembly.assemble(run, jax.devices()[:stages])
    made.program.lower_step()
    package = ROOT / "meshtrain"
    passed = list(dict.fromkeys(str(Path(frame.filename).relative_to(package))
                                for frame in stacks[0] if frame.filename.startswith(f"{package}/")))
    way, staged = ([path for path, _ in listed(form)] for form in (r"\d+\.", "-"))
    on_the_way = {"commands/train.py", "assembly.py", "data/batches/packing.py", "run/loop.py", "training/optimizer.py",
                  "checkpoint/checkpoint.py"}       # before the step is traced, and after the layers
    if stages == 1:
        assert [path for path in way if path not in on_the_way] == passed
    else:
        at = way.index("training/accumulate.py")
        assert way[at + 1] == "training/reduction.py"       # both are replaced
        assert [path for path in way[:at] + staged[:3] + way[at + 2:] if path not in on_the_way] == passed


def test_the_page_of_the_code_names_functions_that_its_files_have():
    items = [*listed(r"\d+\."), *listed("-")]
    wrong = {(path, name) for path, text in items for name in re.findall(r"`(\w+)`", text)
             if not re.search(rf"((def|class) {name}\b|^{name}\b.* = )", (ROOT / "meshtrain" / path).read_text(), re.MULTILINE)}
    beside = re.findall(r"`(\w+)`(?: in| of|, in) `([\w/]+\.py)`", CODE.read_text())
    wrong |= {(path, name) for name, path in beside
              if not re.search(rf"(def|class) {name}\b|^{name}\b", read_source(path), re.MULTILINE)}
    assert len(items) > 20 and len(beside) > 10 and not wrong


def read_source(path: str) -> str:
    """The text of a file that a page names from the root of the repository or of the package."""
    return next(home / path for home in (ROOT, ROOT / "meshtrain") if (home / path).is_file()).read_text()


def test_names_on_the_page_of_the_code_are_names_of_the_code():
    """Of files, folders, functions, classes, constants, arguments and words that are values."""
    known, homes = set(dir(builtins)), (ROOT, ROOT / "meshtrain", ROOT / "tests", *(ROOT / "tests").iterdir())
    for path in (ROOT / "meshtrain").rglob("*.py"):
        for node in sources.nodes_of(path.read_text()):
            known |= {getattr(node, field, None) for field in ("name", "attr", "id", "arg", "value")
                      if isinstance(getattr(node, field, None), str)}
    text = re.sub(r"^```.*?^```", "", CODE.read_text(), flags=re.DOTALL | re.MULTILINE)
    named = {name for name in re.findall(r"`([^`\s]+)`", text) if re.fullmatch(r"[\w./]+", name)}
    wrong = {name for name in named if not name.startswith("optax.")
             if not (any((home / name).exists() for home in homes) if "/" in name or name.endswith((".py", ".json"))
                     else set(name.split(".")) <= known or name in known)}
    assert len(named) > 100 and not wrong


# ---- what a command printed is what it prints ------------------------------------------------------------------------


def quoted(page: Path) -> list[tuple[str, list[str]]]:
    """(command, lines) of the blocks that begin with "$ python -m meshtrain.plan"; lines with … for what is left out.
    """
    blocks = re.findall(r"```(?:text)?\n\$ (python -m meshtrain\.plan .*)\n((?:.*\n)*?)```", page.read_text())
    return [(command, lines.splitlines()) for command, lines in blocks]


QUOTED = [(page, command, lines) for page in PAGES for command, lines in quoted(page)]


@pytest.mark.parametrize("page, command, lines", QUOTED, ids=[page.stem for page, *_ in QUOTED])
def test_what_plan_printed_is_what_it_prints(page, command, lines, capsys):
    assert plan.main(shlex.split(command)[3:]) == 0
    printed = capsys.readouterr().out.splitlines()
    for line in filter(str.strip, lines):
        form = ".*".join(map(re.escape, line.split("…")))
        assert any(re.fullmatch(form, found) for found in printed), f"{page.name}: {line}"


def test_a_search_takes_as_long_as_its_benchmark_took():
    rows = re.findall(r"^\| \S+ \| ([\d,]+) \| [\d,]+ \| [\d,]+ \| [\d,]+ \| ([\d.]+) \|$",
                      (ROOT / "benchmarks" / "plan.md").read_text(), re.MULTILINE)
    gpus = [int(count.replace(",", "")) for count, _ in rows]
    seconds = [float(taken) for _, taken in rows]
    said = (f"{math.ceil(min(seconds))} to {math.ceil(max(seconds))} CPU seconds, for {min(gpus):,} GPUs to "
            f"{max(gpus):,}")
    assert said in (ROOT / "docs" / "plan.md").read_text(), said


def test_plan_is_quoted():
    assert any(page.stem == "plan" and len(lines) > 1 for page, _, lines in QUOTED)


def test_every_line_of_trust_names_tests_that_exist():
    named = re.findall(r"`(test_\w+\.py)(?:::(\w+))?`", (ROOT / "docs/security.md").read_text())
    assert len(named) > 5
    for file, name in named:
        (path,) = (ROOT / "tests").rglob(file)
        assert not name or f"def {name}(" in path.read_text(), name


def test_the_project_has_at_most_15_words_of_its_own():
    ours = (ROOT / "docs" / "glossary.md").read_text().partition("## Terms of the field")[0]
    assert 1 < len(re.findall(r"^\| (?!word |---)", ours, re.MULTILINE)) <= 15
