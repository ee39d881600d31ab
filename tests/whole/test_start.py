"""What a start costs: what the commands import, and how the initialization is compiled."""
import importlib
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain import __main__, assembly, config, flags
from meshtrain.commands import options
from meshtrain.run import hooks

TINY = dict(vocab_size=64, embed_dim=16, num_layers=2, num_heads=2, mlp_dim=32, head_dim=8)
COMMANDS = [name for name in __main__.COMMANDS if name != "train"]

# What the command train imports on a CPU beyond jax, optax, flax.nnx and Python's library. Each module costs every start:
# orbax took half a second, and Pallas's dialects of GPUs a third. Import such a module where a run needs it (`meshtrain.lazy`).
PACKAGES = {"meshtrain", "pydantic", "pydantic_core", "typing_inspection", "annotated_types", "xxhash"}
OF_JAX = {"jax.ad_checkpoint", "jax.experimental.multihost_utils", "jax.experimental.pallas", "jax._src.xla_metadata",
          "jax._src.pallas.cost_estimate", "jax._src.pallas.helpers", "jax._src.pallas.hlo_interpreter", "jax._src.pallas.mpmd",
          "jax._src.pallas.pallas_call", "jax._src.pallas.primitives", "jax._src.pallas.utils"}
IMPORTS = """
import sys, json, jax, optax
from flax import nnx
before = set(sys.modules)
import meshtrain.commands.train
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, "JAX_PLATFORMS": "cpu"}, text=True, check=True,
                          capture_output=True).stdout


def test_train_imports_what_a_start_on_a_cpu_needs_and_no_more():
    more = [name for name in json.loads(run_python(IMPORTS)) if name.partition(".")[0] not in sys.stdlib_module_names]
    assert [name for name in more if name.partition(".")[0] not in PACKAGES | {"jax"}] == []
    assert {name for name in more if name.partition(".")[0] == "jax"} <= OF_JAX
    assert "meshtrain.commands.train" in more


def test_no_command_imports_jax_to_print_its_help():
    told = run_python(f"""
import sys, json
from meshtrain.commands import options
texts = {{name: options.text("meshtrain.commands." + name) for name in {COMMANDS}}}
from meshtrain import run_files
try:
    run_files.load(["--help"])
except SystemExit:
    print(json.dumps([texts, sorted({{"jax", "flax", "optax"}} & set(sys.modules))]))
""")
    texts, imported = json.loads(told.splitlines()[-1])
    assert imported == [] and "--training.steps" in told
    for name, text in texts.items():
        module = importlib.import_module(f"meshtrain.commands.{name}")
        assert text == module.COMMAND.help(module.__doc__)


@pytest.mark.parametrize("words", [["--help"], ["configs/quickstart.toml", "-h"]])
def test_train_prints_the_keys_and_ends_before_it_imports_jax(words):
    done = subprocess.run([sys.executable, "-X", "importtime", "-m", "meshtrain.train", *words], text=True, capture_output=True)
    assert done.returncode == 0 and "--model.num_layers 5" in done.stdout
    assert "pydantic" in done.stderr and "jax" not in {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


def test_options_are_read_from_the_names_that_they_need(tmp_path, monkeypatch):
    (tmp_path / "much_work.py").write_text('''"""About."""
from __future__ import annotations
import no_such_package, json as spelled
from meshtrain import config
WIDTH: int = 3
def parse(text):
    return WIDTH
COMMAND = config.Command("m", {"n": config.Option(spelled.dumps("help"), "N", parse=parse)})
no_such_package.work()
''')
    monkeypatch.syspath_prepend(tmp_path)
    command, about = options.read("much_work")
    assert about == "About." and command.options["n"].help == '"help"' and command.read(["--n", "1"])["n"] == 3
    (tmp_path / "no_options.py").write_text('"""Keys alone."""\n')
    assert options.read("no_options") == (None, "Keys alone.")


@pytest.mark.parametrize("words, level", [
    ("", 1), ("--xla_cpu_enable_fast_math=false", 1), ("--xla_backend_optimization_level=0", None),
    ("--a=1 --xla_backend_optimization_level=3", None)])
def test_programs_on_a_cpu_compile_at_the_first_level_unless_the_user_sets_one(words, level, monkeypatch):
    given = []

    def record(self, compiler_options=None, **kwargs):
        given.append(compiler_options.get(flags.OPTIMIZATION))
        return dict
    monkeypatch.setattr(jax.stages.Lowered, "compile", record)
    monkeypatch.setenv("XLA_FLAGS", words)
    made = assembly.assemble(config.Run(model=TINY, data=dict(seq_len=16, global_batch=2)), jax.devices()[:1])
    assembly.initialize(made)
    assembly.initialize_params(made)
    made.program.compile()
    assert given == [level] * 3 and flags.OPTIMIZATION not in flags.options("gpu", environ={"XLA_FLAGS": words})


def test_the_first_loss_waits_neither_for_the_evaluation_nor_for_the_checkpoint_library():
    validation, compiled = SimpleNamespace(program="traced"), []

    def compile_evaluation():
        compiled.append("once")
        return "compiled"
    hook = hooks.Prepare(validation, compile_evaluation)
    assert hook.after_row and not hook.due(1, True) and hook.due(1, False)
    hook.act(1, None)
    assert validation.program == "compiled" and not hook.due(2, False) and "orbax.checkpoint" in sys.modules
    other = hooks.Prepare(validation, None)
    other.act(1, None)
    assert validation.program == "compiled" and compiled == ["once"]


def test_levels_of_optimization_give_the_same_initial_weights():
    """LLVM reorders no sums of floats, and from level 1 on it fuses the same products with sums."""
    run = config.Run(model=TINY | dict(embed_dim=96, mlp_dim=200), data=dict(seq_len=16, global_batch=8), mesh=dict(fsdp=2))
    made = assembly.assemble(run, jax.devices()[:2])
    lowered = made.program.lower(made.program.initialize)
    at_once, usual = (jax.tree.leaves(lowered.compile(compiler_options={flags.OPTIMIZATION: level})().params)
                      for level in (1, 3))
    for a, b in zip(at_once, usual, strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))
    assert any(leaf.dtype == jnp.float32 and float(jnp.std(leaf)) > 0 for leaf in at_once)
