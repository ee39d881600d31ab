"""A step that waits for links is compiled again, with the roofline's seconds as XLA's profile: the same work, in a
better order."""
import functools
import os
from collections import Counter
from pathlib import Path

import jax
import pytest
from kept_programs import programs_in

from meshtrain import assembly, config, flags, hardware
from meshtrain.cluster import programs
from meshtrain.cost.program import compile, compiled, hlo, roofline, scheduling
from meshtrain.cost.program.compiled import CompiledProgram

needs_compiler = pytest.mark.skipif(
    compile.missing_wheels(), reason=f"pip install -e '.[gpu-compile]': no {compile.missing_wheels()}")
LLAMA = dict(vocab_size=8192, embed_dim=4096, num_layers=4, num_heads=32, num_kv_heads=8, head_dim=128, mlp_dim=14336)


@functools.cache
def made(gpus: int = 64) -> assembly.Assembly:
    """Layers of Llama 3 8B, one sequence a GPU: all of a layer's weights come over the network."""
    run = config.Run(model=LLAMA, mesh=dict(fsdp=gpus), data=dict(seq_len=8192, global_batch=gpus),
                     training=dict(remat="selective"), sharding=dict(rules="sharding_rules/zero3.toml"))
    return assembly.assemble(run, compile.topology(f"h100:{gpus}"))


@functools.cache
def both():
    """(compiled once, compiled as a run compiles it)"""
    return made().program.compile(), assembly.compile_step(made(), made().program.lower_step())


def program(executable) -> CompiledProgram:
    return CompiledProgram.of_run(made(), executable)


def line_of(executable) -> roofline.Roofline:
    return program(executable).roofline


@needs_compiler
def test_half_of_the_waiting_goes_and_the_work_stays():
    once, again = both()
    before, after = line_of(once), line_of(again)
    assert after.exposed_s < .6 * before.exposed_s and after.step_s < before.step_s
    assert after.compute_s == pytest.approx(before.compute_s, rel=.01)
    assert after.exposed_s + after.hidden_s == pytest.approx(before.exposed_s + before.hidden_s, rel=1e-6)
    assert again.memory_analysis().temp_size_in_bytes < 1.1 * once.memory_analysis().temp_size_in_bytes


@needs_compiler
@pytest.mark.parametrize("experts", [0, 8])
def test_absent_gpus_are_not_timed_and_old_jax_starts_the_traffic_of_experts_by_another_estimate(experts):
    model = LLAMA | (dict(num_experts=experts, expert_mlp_dim=512) if experts else {})
    run = config.Run(model=model, mesh=dict(fsdp=8), data=dict(seq_len=8192, global_batch=8))
    options = assembly.assemble(run, compile.topology("h100:8")).program.compiler_options
    assert options["xla_gpu_autotune_level"] == 0
    assert ("xla_gpu_enable_analytical_sol_latency_estimator" in options) == (
        bool(experts) and jax.__version_info__ < (0, 11))


@needs_compiler
def test_the_profile_has_the_seconds_of_every_kernel_and_collective():
    once, _ = both()
    line, each = line_of(once), program(once).instruction_seconds()
    names = {name for kernel in line.kernels for name in kernel.instructions}
    assert len(names - set(each)) <= .02 * len(names)       # XLA renames some when it makes them synchronous
    starts = Counter(ins.op for body in hlo.parse(once.as_text()).computations.values() for ins in body.values()
                     if ins.name in each and ins.op.endswith("-start"))
    assert starts["all-gather-start"] >= 5 and starts["reduce-scatter-start"] + starts["async-start"] >= 5
    gathers = [each[row.name] for body in hlo.parse(once.as_text()).computations.values() for row in body.values()
               if row.op == "all-gather-start" and "[4096,14336]" in row.type_text]
    # 118 MB, of which the network of eight GPUs a host brings 7/8 to each: between its rate and that of NVLink
    assert gathers and all(118e6 / 450e9 < seconds < 118e6 / 50e9 for seconds in gathers)
    written = scheduling.profile(program(once))
    assert written.count("costs {") == len(each) and 'name: "' in written


@needs_compiler
def test_the_shorter_step_is_kept_if_the_memory_is_there(monkeypatch):
    once, (before, after) = both()[0], map(program, both())
    assert scheduling.is_better(after, before) and not scheduling.is_better(before, after)
    monkeypatch.setattr(hardware, "usable_bytes", lambda gpu: 0)
    assert scheduling.is_better(after, before) == (after.memory_bytes["total"] <= before.memory_bytes["total"])
    monkeypatch.setattr(scheduling, "is_better", lambda *_: False)
    kept = assembly.compile_step(made(), made().program.lower_step())
    assert line_of(kept).step_s == line_of(once).step_s


@needs_compiler
def test_a_step_that_waits_little_or_runs_on_one_gpu_is_compiled_once(monkeypatch):
    once, _ = both()
    monkeypatch.setattr(scheduling, "WAITING", 1.0)
    assert scheduling.profile(program(once)) == ""
    monkeypatch.setattr(scheduling, "WAITING", 0.0)
    assert scheduling.profile(program(once))
    monkeypatch.setattr(scheduling, "WAITING_S", 10.0)
    assert scheduling.profile(program(once)) == ""
    monkeypatch.setattr(scheduling, "WAITING_S", 0.0)
    assert scheduling.profile(CompiledProgram.of_run(made(1), None)) == ""
    cpu = assembly.assemble(config.Run(mesh=dict(fsdp=8), data=dict(global_batch=8)), jax.devices())
    assert scheduling.profile(CompiledProgram.of_run(cpu, None)) == ""


@needs_compiler
def test_a_step_that_cannot_be_priced_is_trained_all_the_same(monkeypatch, capfd):
    once, _ = both()
    monkeypatch.setattr(compiled.rooflines, "read", lambda *_: 1 / 0)
    assert assembly.compile_step(made(), made().program.lower_step()).as_text() == once.as_text()
    assert "the step keeps XLA's own schedule" in capfd.readouterr().err


def test_a_profile_of_the_user_s_own_is_not_replaced():
    path = Path("/somewhere/x.pbtxt")
    assert flags.profile_options(path, {})[flags.PROFILE] == str(path)
    assert flags.PROFILE not in flags.options("gpu", environ={})
    assert flags.profile_options(path, {"XLA_FLAGS": f"--{flags.PROFILE}=mine.pb"}) == {}


@pytest.mark.parametrize("cached", [True, False])
def test_a_profile_has_the_same_path_at_every_start(tmp_path, monkeypatch, cached):
    monkeypatch.setattr(programs.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    with programs_in(str(tmp_path / "cache") if cached else None):
        one, other, same = map(programs.keep_profile, ("a", "b", "a"))
        assert one == same != other and one.read_text() == "a"
        assert tmp_path / ("cache" if cached else "temporary") in one.parents
        for number in range(programs.MOST_KEPT + 5):
            newest = programs.keep_profile(str(number))
    assert len(list(one.parent.iterdir())) == programs.MOST_KEPT and newest.exists()


def test_a_profile_is_not_put_where_others_may_write(tmp_path, monkeypatch):
    """In a world-writable place anybody can make the directory first."""
    monkeypatch.setattr(programs.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / f"meshtrain-{os.getuid()}").mkdir()
    (tmp_path / f"meshtrain-{os.getuid()}").chmod(0o777)
    with programs_in(None):
        assert programs.keep_profile("a") is None


def test_a_profile_that_cannot_be_written_leaves_xla_s_order(tmp_path):
    (tmp_path / "file").write_text("")
    with programs_in(str(tmp_path / "file")):
        assert programs.keep_profile("a") is None
