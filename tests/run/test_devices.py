"""The environment that a process sets before jax starts: what the user says stays, and no flag that this XLA does not
know."""
import logging
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import meshtrain as mt
from meshtrain import assembly, config, devices, flags, run_files
from meshtrain.commands import inspect, plan, train
from meshtrain.cluster import watch
from meshtrain.inspection import memory, step_costs

ROOT = Path(__file__).resolve().parent.parent.parent
FLAGS = [one for one in devices.ON_GPUS if one.name.startswith("--")]


def test_the_flags_of_gpus_are_known_to_this_xla_and_one_that_is_not_is_left_out(monkeypatch):
    names = [one.name for one in FLAGS]
    assert flags.find_known([*names, "--xla_gpu_no_such_flag", names[0][:-1]]) == set(names)
    odd = devices.Default("--xla_gpu_no_such_flag", "1", "a flag of another XLA")
    monkeypatch.setattr(devices, "ON_GPUS", (odd, *devices.ON_GPUS))
    environ = {}
    devices.prepare_gpus(environ)
    assert environ["XLA_FLAGS"].split() == [f"{one.name}={one.value}" for one in FLAGS]
    assert {name: environ[name] for name in ("XLA_CLIENT_MEM_FRACTION", "NCCL_DEBUG")} == {
        "XLA_CLIENT_MEM_FRACTION": "0.92", "NCCL_DEBUG": "WARN"}


def test_where_xlas_libraries_are_not_found_no_flag_is_set(monkeypatch):
    monkeypatch.setattr(flags, "xla_libraries", list)
    environ = {"XLA_FLAGS": "--mine=1"}
    devices.prepare_gpus(environ)
    assert environ["XLA_FLAGS"] == "--mine=1" and environ["NCCL_DEBUG"] == "WARN"


def test_what_the_user_has_set_stays():
    given = {"NCCL_DEBUG": "INFO", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5",
             "XLA_FLAGS": f"{FLAGS[0].name}=1h --other=2"}
    environ = dict(given)
    devices.prepare_gpus(environ)
    assert environ["XLA_FLAGS"].split() == [f"{FLAGS[0].name}=1h", "--other=2", f"{FLAGS[1].name}={FLAGS[1].value}"]
    assert {name: environ[name] for name in environ if name != "XLA_FLAGS"} == {
        name: given[name] for name in given if name != "XLA_FLAGS"}


def test_a_share_of_memory_that_is_none_is_a_mistake():
    with pytest.raises(config.ConfigError, match="XLA_CLIENT_MEM_FRACTION=2"):
        devices.prepare_gpus({"XLA_CLIENT_MEM_FRACTION": "2"})


def test_simulated_devices_keep_the_users_flags_and_their_own_count(monkeypatch):
    """In a process of its own: XLA reads its flags once, and takes these."""
    code = ("import os\nfrom meshtrain import devices, run_files\n"
            "run = run_files.load(['--mesh.simulated_devices', '4', '--mesh.fsdp', '-1', '--mesh.data', '1', "
            "'--mesh.tensor', '1'])\nprint(len(devices.start(run)), os.environ['XLA_FLAGS'])")
    given = " ".join(f"{one.name}={one.value}" for one in FLAGS)        # of GPUs: known to the CPU's XLA as well
    environ = {"PATH": "/usr/bin", "PYTHONPATH": str(ROOT), "XLA_FLAGS": f"{devices.DEVICE_COUNT_FLAG}=2 {given}"}
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environ, text=True,
                         capture_output=True, timeout=300)
    ours = [f"{one.name}={one.value}" for one in (*devices.ON_CPUS, *devices.SIMULATED)]
    assert ran.stdout.split() == ["4", *given.split(), *ours, f"{devices.DEVICE_COUNT_FLAG}=4"], ran


def test_a_count_of_devices_in_jaxs_own_variable_is_told_and_not_taken():
    code = ("from meshtrain import devices, run_files\n"
            "run = run_files.load(['--mesh.simulated_devices', '4', '--mesh.fsdp', '-1', '--mesh.data', '1', "
            "'--mesh.tensor', '1'])\nprint(len(devices.start(run)))")
    environ = {"PATH": "/usr/bin", "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "2"}
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environ, text=True, capture_output=True,
                         timeout=300)
    assert ran.stdout == "4\n", ran
    assert "warning: jax_num_cpu_devices=2 (JAX_NUM_CPU_DEVICES) is ignored" in ran.stderr


@pytest.fixture
def changed():
    """jax.config.update, taken back at the end."""
    before = {}

    def update(name, value):
        before.setdefault(name, getattr(jax.config, name))
        jax.config.update(name, value)
    yield update
    for name, value in before.items():
        jax.config.update(name, getattr(value, "value", value))


OTHERWISE = {"jax_default_prng_impl": "rbg", "jax_random_seed_offset": 5, "jax_default_matmul_precision": "highest",
             "jax_numpy_dtype_promotion": "strict", "jax_numpy_rank_promotion": "raise",
             **{one.name: "disallow" for one in devices.OF_JAX if "guard" in one.name},
             **{one.name: "raise" for one in devices.OF_JAX if "checking" in one.name}}


@pytest.mark.parametrize("one", devices.OF_JAX, ids=lambda one: one.name)
def test_a_setting_of_jax_is_the_runs_and_who_said_otherwise_is_told(one, changed):
    if one.name not in jax.config.values:
        pytest.skip("of another version of jax")
    assert devices.own_settings({}) == [], "jax's default is what a run has"
    changed(one.name, OTHERWISE.get(one.name, not one.value))
    # who sets it in the process may need it
    with pytest.raises(config.ConfigError, match=f'{one.name}=.* was set in this process, .*update."{one.name}"'):
        devices.own_settings({"JAX_OTHER": "1"})
    variable = one.name.upper()
    (line,) = devices.own_settings({variable: "given"})
    assert line.startswith(f"{variable}=given is ignored: a run needs {one.name}={one.value}")
    assert devices.own_settings({variable: "given"}) == []


def test_a_context_that_sets_jax_otherwise_is_refused():
    with jax.enable_x64(True), pytest.raises(config.ConfigError, match="jax_enable_x64=True was set in this process"):
        devices.own_settings({"JAX_ENABLE_X64": "0"})
    assert devices.own_settings({}) == []


def test_an_experiment_refuses_what_its_process_has_set_since_and_goes_on_when_it_is_taken_back(changed):
    run = mt.Experiment(settings={"mesh.fsdp": 2, "model.num_layers": 1})
    assert run.made.mesh.size == 2
    changed("jax_numpy_rank_promotion", "raise")
    with pytest.raises(config.ConfigError, match="jax_numpy_rank_promotion=raise was set in this process"):
        run.loss()
    changed("jax_numpy_rank_promotion", "allow")
    assert run.made.mesh.size == 2


def test_the_page_has_the_table_of_jaxs_settings():
    text = (ROOT / "docs" / "numbers.md").read_text()
    rows = re.findall(r"^\| `(jax_\w+)` \| `(\S+)` \| (.+) \|$", text, re.MULTILINE)
    assert rows == [(one.name, str(one.value), one.why) for one in devices.OF_JAX]


SETTLED = """
import os, sys
index = int(sys.argv[2])
os.environ |= [{}, {"JAX_DEFAULT_PRNG_IMPL": "rbg", "JAX_DEBUG_NANS": "1"}][index]
import jax
from meshtrain import config, devices, run_files
from meshtrain.cluster import agree, find
run = run_files.load(["--mesh.simulated_devices", "2", "--mesh.fsdp", "-1", "--mesh.data", "1", "--mesh.tensor", "1"])
devices.start(run, find.Cluster(sys.argv[1], 2, index))
print(jax.random.bits(jax.random.key(0)))
jax.config.update("jax_compilation_cache_dir", f"/of/host{index}")      # may differ
os.environ["XLA_FLAGS"] += f" --xla_dump_to=/tmp/{index}"
devices.compare_settings([])
os.environ["XLA_FLAGS"] += " --xla_cpu_enable_fast_math=true" * index
jax.config.update("jax_optimization_level", ["O1", "O2"][index])
try:
    devices.compare_settings([])
except config.ConfigError as error:
    print(error)
agree.exchange(None)
"""


def test_processes_with_other_environments_have_the_same_settings_or_are_refused():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    environ = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "NPROC")}
    children = [subprocess.Popen([sys.executable, "-c", SETTLED, address, str(index)], cwd=ROOT, text=True,
                                 env=environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE) for index in range(2)]
    said = [child.communicate(timeout=120) for child in children]
    assert [child.returncode for child in children] == [0, 0], said
    both = [[line for line in out.splitlines() if "Gloo" not in line] for out, _ in said]
    assert len(both[0]) == 2 and both[0] == both[1], "the same bits, and the same message"
    for part in ("process 0: jax_optimization_level=o1; process 1: jax_optimization_level=o2, "
                 "XLA_FLAGS --xla_cpu_enable_fast_math=true", "the same files, flags and environment"):
        assert part in said[0][0], said
    assert "dump" not in said[0][0] and "cache" not in said[0][0]
    told = [line for line in said[0][1].splitlines() if "is ignored" in line]
    assert len(told) == 2 and all(line.startswith("warning: process 1: JAX_DE") for line in told), said
    assert "is ignored" not in said[1][1]


def test_sums_in_many_dimensions_are_right_on_cpus():
    """As XLA fuses them unless told: https://github.com/jax-ml/jax/issues/39257."""
    code = ("import numpy as np, jax\nfrom meshtrain import devices, run_files\n"
            "devices.start(run_files.load(['--mesh.simulated_devices', '0']))\n"
            "a, b = np.random.default_rng(0).standard_normal((2, 1, 4, 1, 1, 16, 4, 4, 8)).astype(np.float32)\n"
            "for axis in (-1, -2, -3):\n"
            "    found = jax.jit(lambda a, b: (a * b).sum(axis))(a, b)\n"
            "    assert np.abs(found - (a * b).sum(axis)).max() < 1e-5, axis\n")
    environ = {"PATH": "/usr/bin", "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environ, check=True, timeout=300)


def test_flags_of_another_xla_are_a_mistake_that_names_them(monkeypatch):
    """XLA aborts at them in C++; a launcher would start the run again and again."""
    own = f"{devices.DEVICE_COUNT_FLAG}=4 {FLAGS[0].name}=1h --xla_gpu_autotune_level=0"
    devices.refuse_unknown_flags({"XLA_FLAGS": own})
    with pytest.raises(config.ConfigError,
                       match="XLA_FLAGS has --xla_bogus, which the XLA of jaxlib .* does not know") as raised:
        devices.refuse_unknown_flags({"XLA_FLAGS": f"{own} --xla_bogus=1"})
    assert "remove it" in str(raised.value)
    monkeypatch.setattr(flags, "xla_libraries", list)
    devices.refuse_unknown_flags({"XLA_FLAGS": "--xla_bogus=1"})       # nobody knows


def test_xla_flags_that_name_a_file_are_the_flags_in_it(tmp_path):
    file = tmp_path / "flags of mine.txt"
    file.write_text(f"""# of the image
{FLAGS[0].name}=1h   # why
\t--xla_dump_to="/a  b#c" --xla_gpu_autotune_level=0\r
  # --xla_bogus=1

--xla_cpu_enable_fast_math""")
    environ = {"XLA_FLAGS": str(file)}
    devices.refuse_unknown_flags(environ)
    devices.prepare_gpus(environ)
    assert environ["XLA_FLAGS"] == (
        f'{FLAGS[0].name}=1h --xla_dump_to="/a  b#c" --xla_gpu_autotune_level=0 --xla_cpu_enable_fast_math '
        f'{FLAGS[1].name}={FLAGS[1].value}')
    file.write_text("--xla_bogus=1\n")
    with pytest.raises(config.ConfigError, match="XLA_FLAGS has --xla_bogus, which"):
        devices.refuse_unknown_flags({"XLA_FLAGS": str(file)})
    file.write_text("")
    devices._set(environ := {"XLA_FLAGS": f" {file}\n"}, devices.SIMULATED)
    assert environ["XLA_FLAGS"] == f"{devices.SIMULATED[0].name}=false"


def test_a_command_that_compiles_for_absent_gpus_reads_the_file_of_flags_too(tmp_path, monkeypatch, capfd):
    """XLA would abort where it cannot read it."""
    monkeypatch.chdir(ROOT)
    for main, words in ((inspect.main, ("configs/quickstart.toml", "--topology", "h100:8")),
                        (plan.main, ("configs/quickstart.toml", "--gpus", "8", "--gpu", "h100", "--verify", "1"))):
        monkeypatch.setenv("XLA_FLAGS", f"{tmp_path}/absent")
        assert main(words) == 2
        assert f"error: XLA_FLAGS={tmp_path}/absent is neither flags nor a readable file" in capfd.readouterr().err


def test_a_file_of_flags_that_cannot_be_read_and_words_that_are_no_flags_are_mistakes(tmp_path):
    (tmp_path / "binary").write_bytes(b"--xla_a=\xff\xfe")
    (tmp_path / "words").write_text("--xla_gpu_autotune_level=0\nxla_dump_to=/x\n")
    for text, told in (("absent", "No such file"), ("", "Is a directory"), ("binary", "UTF-8"),
                       ("words", "has xla_dump_to=/x, which is not a flag")):
        with pytest.raises(config.ConfigError, match=f"XLA_FLAGS={tmp_path}.*{told}"):
            devices.prepare_gpus({"XLA_FLAGS": f"{tmp_path}/{text}"})
    for text, word in (("--xla_dump_to /x --xla_gpu_autotune_level=0", "/x"), ("--a=1 # --b=2", "#"),
                       ('--a="b c" d', "d"), ("--a=b,--c=d e", "e")):
        with pytest.raises(config.ConfigError, match=f"XLA_FLAGS has {word}, which is not a flag"):
            devices._set({"XLA_FLAGS": text}, ())
    with pytest.raises(config.ConfigError, match="XLA_FLAGS=\x00"):
        devices._set({"XLA_FLAGS": "\x00"}, ())


@pytest.mark.parametrize("main", [train.main, inspect.main])
def test_a_layout_that_cannot_be_is_told_before_a_device_is_started(main, monkeypatch, tmp_path, capsys):
    """4,096 simulated devices take as many threads and gigabytes, and their process minutes to end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(devices, "start", lambda *_: pytest.fail("devices are started"))
    assert main(["--mesh.simulated_devices", "4096", "--mesh.data", "4096", "--mesh.fsdp",
                 "1", "--mesh.tensor", "1"]) == 2
    assert "does not divide" in capsys.readouterr().err


def test_a_driver_that_hangs_at_the_start_is_watched(monkeypatch, tmp_path, capsys):
    def started():
        now = watch._watchdog._now
        raise config.ConfigError(f"in the phase {now.phase} for {now.limit_s:g} s")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jax, "devices", started)
    assert train.main(["--distributed.timeout_s=7"]) == 2
    assert capsys.readouterr().err == "error: in the phase starting the devices for 7 s\n"


def test_the_page_has_the_table_of_the_environment():
    text = (ROOT / "docs" / "gpus.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| `(\S+)` \| (.+) \|$", text, re.MULTILINE)
    assert rows == [(one.name, one.value, one.why) for one in devices.ON_GPUS]


def test_compiled_programs_beyond_the_limit_are_removed_the_oldest_first(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "KEPT_PROGRAM_BYTES", 250)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    for age, name in enumerate(("d", "c", "b", "a")):
        (tmp_path / f"{name}-cache").write_bytes(b"x" * 100)
        os.utime(tmp_path / f"{name}-cache", (1e9 - age, 1e9 - age))
    (tmp_path / "notes.txt").write_text("theirs" * 100)
    devices._keep_programs(str(tmp_path), trims=False)
    assert len(list(tmp_path.iterdir())) == 5
    devices._keep_programs(str(tmp_path), trims=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c-cache", "d-cache", "notes.txt"]
    devices._keep_programs(str(tmp_path / "none"), trims=True)


@pytest.mark.parametrize("mode, owner, words", [
    (0o755, 0, ""), (0o775, 0, "can be written by others (mode 775; chmod 700"), (0o1777, 0, "can be written by others"),
    (0o700, 4711, "belongs to user 4711")])
def test_programs_are_kept_only_where_no_other_user_can_put_one(mode, owner, words, tmp_path, monkeypatch, capfd):
    """They are machine code."""
    asked = []
    monkeypatch.setattr(jax.config, "update", lambda *words: asked.append(words))
    place = tmp_path / "cache"
    place.mkdir()
    place.chmod(mode)
    if owner and os.geteuid():
        pytest.skip("only root gives a directory away")
    os.chown(place, owner or os.geteuid(), -1)
    devices._keep_programs(str(place), trims=False)
    assert words in capfd.readouterr().err and bool(asked) == (not words)
    devices._keep_programs(str(tmp_path / "new"), trims=False)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_no_program_that_is_loaded_is_a_pickle():
    for path in (ROOT / "meshtrain").rglob("*.py"):
        assert not re.search(r"^import pickle|serialize_executable|pickle\.loads?\(", path.read_text(), re.MULTILINE), path


def test_without_a_home_no_directory_of_that_name_is_made(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(jax.config, "update", lambda *words: asked.append(words))
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    devices._keep_programs("~/.cache/meshtrain", trims=True)
    assert asked == []


def test_a_model_beyond_the_memory_of_the_machine_is_refused_before_it_is_made(monkeypatch):
    made = assembly.assemble(run_files.load(["--mesh.simulated_devices", "8"]), jax.devices()[:8])
    step_costs.check_memory(made)
    monkeypatch.setattr(devices, "memory_bytes", lambda found: 1 << 20)
    with pytest.raises(config.ConfigError,
                       match="the weights and the optimizer's state take .* on 8 simulated devices of this machine, "
                             "which has 1.0 MiB"):
        step_costs.check_memory(made)
    weights = 8 * memory.formula(made)["params"]        # which fit, and the optimizer's state beside them does not
    monkeypatch.setattr(devices, "memory_bytes", lambda found: weights + 1)
    with pytest.raises(config.ConfigError, match="the weights and the optimizer's state take"):
        step_costs.check_memory(made)


@pytest.mark.parametrize("driver, text, shown", [
    ((), "Exception when calling jax_plugins.xla_cuda12.initialize()", False),
    (("/dev/null",), "Exception when calling jax_plugins.xla_cuda12.initialize()", True),
    ((), "Exception when calling jax_plugins.xla_rocm60.initialize()", True)])
def test_a_cuda_plugin_that_fails_is_shown_where_there_is_a_gpu(driver, text, shown, monkeypatch, caplog):
    monkeypatch.setattr(mt, "GPU_DRIVER", driver)
    logging.getLogger("jax._src.xla_bridge").error("Jax plugin configuration error: %s", text)
    assert (text in caplog.text) == shown
