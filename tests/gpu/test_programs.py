"""Every program of a run is compiled with the same options and searched, and the options are those that were asked
for."""
import dataclasses
import os
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshtrain as mt
from meshtrain import assembly, config, flags, trained
from meshtrain.commands import inspect, plan, train
from meshtrain.cost.program import audit, compile
from meshtrain.inference.generate import GenerationLimits
from meshtrain.inference.sampling import Picking

TINY = dict(vocab_size=300, embed_dim=16, num_layers=1, num_heads=2, mlp_dim=16)
PERMUTE = ('%p.1 = f32[4]{0} collective-permute(%x), channel_id=1, source_target_pairs={%s}, '
           'metadata={op_name="jit(f)/while/body/shift"}')
GPUS = types.SimpleNamespace(shape={"data": 2, "tensor": 2},
                             devices=np.array([types.SimpleNamespace(platform="gpu")] * 4))


def executable(*lines: str):
    return types.SimpleNamespace(as_text=lambda: "\n".join(
        ["ENTRY %main (x: f32[4]) -> f32[4] {", *(f"  {line}" for line in lines), "}"]))


@pytest.mark.parametrize("pairs", ["", "{0,1}", "{0,3},{3,0}"])
def test_a_permute_that_leaves_devices_with_zeros_is_refused_by_name(pairs):
    broken = executable(PERMUTE.replace("%s", pairs))
    with pytest.raises(assembly.BrokenProgramError, match=r"the evaluation to 1 collective permute.*p\.1: .*shift"):
        assembly.check_program(GPUS, "the evaluation", broken)
    also_async = executable(PERMUTE.replace("%s", pairs).replace("permute(", "permute-start("))
    assert len(audit.broken_permutes(also_async.as_text(), GPUS)) == 1


@pytest.mark.parametrize("pairs", ["{0,1},{1,0},{2,3},{3,2}", "{0,2},{1,3}", "{0,1},{2,3}"])
def test_whole_permutes_and_shifts_along_an_axis_are_not_refused(pairs):
    sound = executable(PERMUTE.replace("%s", pairs), "%g = f32[4]{0} all-gather(%x)")
    assert assembly.check_program(GPUS, "the step", sound) is sound


def test_the_search_finds_what_the_whole_audit_finds():
    texts = ["HloModule m\n\n" + executable("%x = f32[4]{0} parameter(0)", PERMUTE.replace("%s", pairs)).as_text()
             for pairs in ("", "{0,1}", "{0,1},{1,0},{2,3},{3,2}", "{0,2},{1,3}")]
    for text in texts:
        assert tuple(audit.broken_permutes(text, GPUS)) == audit.read(text, GPUS).broken_permutes, text


def test_a_broken_program_ends_the_run_with_one_message_before_its_first_step(tmp_path, monkeypatch, capsys):
    search = assembly.check_program

    def broken(mesh, name, executable):
        if name == "the evaluation":
            executable = types.SimpleNamespace(as_text=lambda: PERMUTE.replace("%s", ""))
            mesh = GPUS
        return search(mesh, name, executable)
    monkeypatch.setattr(assembly, "check_program", broken)
    monkeypatch.setattr(assembly, "may_refuse", lambda mesh: True)
    sections = {"model": TINY, "data": dict(seq_len=16, global_batch=16, cache=tmp_path / "cache"),
                "training": dict(steps=1), "run": dict(dir=tmp_path / "run", sample_tokens=0, compilation_cache="")}
    assert train.main([word for section, keys in sections.items() for key, value in keys.items()
                       for word in (f"--{section}.{key}", str(value))]) == train.FAILED
    err = capsys.readouterr().err
    assert "error: XLA compiled the evaluation to 1 collective permute" in err and err.count("error:") == 1
    assert "Traceback" not in err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("command, words", [(inspect, ("--data.global_batch", "8")),
                                            (plan, ("llama3-8b", "--gpus", "8", "--gpu", "h100", "--verify", "1"))])
@pytest.mark.parametrize("given", ["", "--xla_gpu_autotune_level=0"])
def test_what_xla_cannot_compile_is_one_message_with_the_remedy(command, words, given, monkeypatch, capsys):
    def fails(self, compiler_options=None, **kwargs):
        raise jax.errors.JaxRuntimeError("INTERNAL: No supported config found for HLO:\n %dot" + ".1" * 999)
    if command is plan and compile.missing_wheels():
        pytest.skip("install the extra gpu-compile")
    monkeypatch.setattr(jax.stages.Lowered, "compile", fails)
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} {given}")
    assert command.main(words) == 1
    err = capsys.readouterr().err
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert f"XLA of jax {jax.__version__} cannot compile" in line and "No supported config found for HLO: %dot.1" in line
    assert "use another version of jax" in line and len(line) < 700 and "Traceback" not in err
    assert f"leave {given} out of XLA_FLAGS" in line if given else "XLA_FLAGS" not in line


@pytest.mark.skipif(compile.missing_wheels(), reason=f"install the extra gpu-compile: no {compile.missing_wheels()}")
@pytest.mark.parametrize("call", [
    lambda x: jax.debug.print("{}", x), lambda x: jax.debug.callback(print, x),
    lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)])
def test_python_functions_that_absent_gpus_would_call_are_one_message(call):
    def f(x):
        return x + y if (y := call(x)) is not None else x
    with pytest.raises(compile.NotCompiledError, match="f: a call of a Python function on the host .* leave it out$"):
        mt.inspect(jax.jit(f), jnp.ones(4), topology="h100:1")


def test_step_evaluation_initialization_and_sampling_are_compiled_with_the_same_options(monkeypatch):
    options, compile_lowered = [], jax.stages.Lowered.compile

    def recorded(self, compiler_options=None, **kwargs):
        options.append(compiler_options)
        return compile_lowered(self, compiler_options, **kwargs)
    monkeypatch.setattr(jax.stages.Lowered, "compile", recorded)
    monkeypatch.setattr(flags, "options", lambda *args: {"xla_backend_optimization_level": 0})
    run = config.Run(model=TINY, data=dict(seq_len=16, global_batch=2))
    made = assembly.assemble(run, jax.devices()[:1])
    state = assembly.initialize(made)
    assembly.compile_step(assembly.compile_evaluation(made), made.program.lower_step())
    with jax.set_mesh(made.mesh):
        generator = trained.wrap(made, state.params).generator()
        # the largest seed of a run file
        (answer,) = generator.complete([[256]], GenerationLimits(5), Picking(1.0), 2**32 - 1)
    assert options == [{"xla_backend_optimization_level": 0}] * 7 and len(answer.tokens) == 5


def test_nothing_is_asked_of_cpus_for_deterministic_runs():
    assert flags.options("cpu", {flags.DETERMINISTIC}) == flags.options("cpu")


def test_a_program_gets_the_flags_whose_condition_holds():
    names = lambda *facts: set(flags.options("gpu", set(facts), environ={}))
    of = lambda *conditions: {flag.name for flag in flags.ON_GPUS if flag.when in conditions}
    assert names() == of(flags.ALWAYS) and "xla_gpu_enable_latency_hiding_scheduler" in names()
    facts = (flags.DETERMINISTIC, flags.SEVERAL, flags.EXPERTS_OLD, flags.OFFLOAD, flags.CUBLAS, flags.DECODING,
             flags.DEVICELESS, flags.DEVICELESS_11)
    for fact in facts:
        assert names(fact) == of(flags.ALWAYS, fact)
    assert not names(*facts) & of(flags.NEVER)


def test_collectives_overlap_with_experts_or_stages_but_never_beside_copies_to_the_host():
    """Reported to corrupt training together: offload, the latency-hiding scheduler, and a limit above 1."""
    assert flags.options("gpu", {flags.SEVERAL})[flags.OVERLAP] > 1
    assert flags.options("gpu", {flags.OFFLOAD, flags.SEVERAL})[flags.OVERLAP] == 1


def test_a_flag_of_the_user_is_not_overridden(monkeypatch):
    """Options of a program win over XLA_FLAGS, so that they are not given."""
    name = "xla_gpu_enable_latency_hiding_scheduler"
    assert name not in flags.options("gpu", environ={"XLA_FLAGS": f"--a=1 --{name}=false"})
    assert name in flags.options("gpu", environ={"XLA_FLAGS": f"--{name}_of_another=false"})


def test_a_flag_that_this_xla_does_not_know_is_not_given(monkeypatch):
    odd = flags.Flag("xla_gpu_no_such_flag", True, flags.ALWAYS, "", "", "", "")
    monkeypatch.setattr(flags, "ON_GPUS", (*flags.ON_GPUS, odd))
    flags._find_known_of_table.cache_clear()
    assert odd.name not in flags.options("gpu")
    flags._find_known_of_table.cache_clear()


def test_the_table_tells_which_flags_this_xla_knows():
    known = {flag.name for flag in flags.ON_GPUS if flags.is_known(flag.name)}
    newer = {flag.name for flag in flags.ON_GPUS if flag.since == "0.12"}
    assert known == {flag.name for flag in flags.ON_GPUS} - (newer if jax.__version_info__ < (0, 11) else set())
    assert all(flag.why and flag.source and flag.default for flag in flags.ON_GPUS)
    tried = [str(flag.value) for flag in flags.ON_GPUS if flag.name == "xla_gpu_enable_command_buffer"]
    assert tried and not any("COLLECTIVES" in value for value in tried), "it hangs"


@pytest.mark.skipif(compile.missing_wheels(), reason=f"install the extra gpu-compile: no {compile.missing_wheels()}")
def test_a_step_compiles_with_every_flag_of_the_table():
    """What XLA does not know, or a value that it does not take, raises when a program is compiled."""
    run = config.Run(model=TINY, mesh={"fsdp": 8}, data=dict(seq_len=64, global_batch=8))
    made = assembly.assemble(run, compile.topology("h100:8"))
    for given in ({}, {flag.name: flag.value for flag in flags.ON_GPUS if flags.is_known(flag.name)}):
        program = dataclasses.replace(made.program, compiler_options=made.program.compiler_options | given)
        assert program.compile().as_text().startswith("HloModule")


@pytest.mark.skipif(compile.missing_wheels(), reason=f"install the extra gpu-compile: no {compile.missing_wheels()}")
@pytest.mark.parametrize("mesh, cublas", [({"fsdp": 4}, True), ({"fsdp": 2, "tensor": 2}, False)])
def test_matmuls_are_cublas_s_alone_where_nothing_splits_a_layer(mesh, cublas):
    rules = "zero3" if "tensor" in mesh else "zero3"
    run = config.Run(model=TINY, mesh=mesh, sharding=dict(rules=f"sharding_rules/{rules}.toml"),
                     data=dict(seq_len=64, global_batch=4))
    options = assembly.assemble(run, compile.topology("h100:4")).program.compiler_options
    assert ("xla_gpu_enable_triton_gemm" in options) == (cublas or (0, 11) <= jax.__version_info__ < (0, 12))


def test_xla_may_fill_what_the_process_takes(monkeypatch):
    """Beyond its limit, 80% of a GPU, XLA recomputes by itself: of a process that takes 92% the limit is 92%."""
    limit = lambda share: flags.options("gpu", memory_share=share)["xla_gpu_memory_limit_slop_factor"]
    assert (limit(0.92), limit(0.8), limit(0.4)) == (115, 100, 50)


@pytest.mark.skipif(compile.missing_wheels(), reason=f"install the extra gpu-compile: no {compile.missing_wheels()}")
def test_a_deterministic_step_adds_in_a_fixed_order_and_takes_no_kernel_by_timing():
    """XLA sorts what a scatter adds, and then no two threads add to one place; matmuls are cuBLAS's own choice."""
    def text(deterministic):
        run = config.Run(model=TINY | dict(compute_dtype="bfloat16"), data=dict(seq_len=64, global_batch=2),
                         training=dict(deterministic=deterministic))
        return assembly.assemble(run, compile.topology("h100:1")).program.compile().as_text()
    asked, plain = text(True), text(False)
    scatters = [[line for line in t.splitlines() if " scatter(" in line] for t in (asked, plain)]
    assert scatters[0] and all("indices_are_sorted=true" in line or "unique_indices=true" in line
                               for line in scatters[0])
    assert scatters[1] and not any("unique_indices=true" in line for line in scatters[1])
    assert all("__triton_gemm" not in t and "cublas" in t for t in (asked, plain))
