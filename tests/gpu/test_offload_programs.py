"""Moments in host memory, compiled for absent GPUs: the device holds less by all of them, and nothing else changes."""
import jax
import pytest
from gpu_programs import needs_compiler

from meshtrain import assembly, config, devices, hardware, jax_private
from meshtrain.commands import inspect
from meshtrain.config import ConfigError
from meshtrain.cost.formulas import price
from meshtrain.cost.program import compile as gpu_compile
from meshtrain.inspection import fitting, memory, report, step_costs
from meshtrain.shipped import rule_file

pytestmark = [needs_compiler, pytest.mark.full]
LAYOUTS = {"zero3": (dict(fsdp=8), {}), "zero1": (dict(data=4, tensor=2), dict(microbatches=2)),
           "ddp": (dict(stage=2, data=4), dict(microbatches=4))}


def run_of(rules: str, offload: bool, **optimizer) -> config.Run:
    mesh, training = LAYOUTS[rules]
    return config.Run(
        mesh=mesh, sharding=dict(rules=str(rule_file(rules))), training=training, data=dict(seq_len=2048, global_batch=64),
        model=dict(vocab_size=32768, embed_dim=1024, num_layers=8, num_heads=8, head_dim=128, mlp_dim=4096),
        optimizer=dict(offload=offload, **optimizer))


def assembled(run: config.Run) -> assembly.Assembly:
    return assembly.assemble(run, gpu_compile.topology("h100:8"))


@pytest.mark.parametrize("rules, dtype", [("zero3", "float32"), ("zero3", "bfloat16"), ("zero1", "float32"), ("ddp", "float32")])
def test_the_device_holds_less_by_the_moments_and_the_prices_agree(rules, dtype):
    near, far = (inspect.inspect_step(assembled(run_of(rules, there, moments_dtype=dtype))) for there in (False, True))
    moments = memory.host_moments(far.made)
    assert moments > 0.99 * near.memory_bytes["optimizer"]
    stats = far.executable.memory_analysis()
    assert stats.host_argument_size_in_bytes == stats.host_alias_size_in_bytes == moments, "updated in place"
    assert stats.host_temp_size_in_bytes == 0 == near.executable.memory_analysis().host_argument_size_in_bytes
    # at most, the old and the new moments of one of a stage's four layers, or of two of eight
    assert far.memory_bytes["total"] < near.memory_bytes["total"] - moments + moments / 4
    assert far.memory_bytes["host"] == far.formulas.memory_bytes["host"] == moments
    assert far.differences == near.differences == []
    gpu = hardware.get("h100")
    rated = fitting.rates_of(gpu)
    by_formula = [price.Pricing(one.made.placed, rated, fitting.options_of(one.made, gpu, rated)).price()
                  for one in (near, far)]
    copies_s = 2 * moments / 50e9
    assert by_formula[1].update_s - by_formula[0].update_s == pytest.approx(copies_s, rel=0.02)
    copies = [kernel for kernel in far.program.roofline.kernels if kernel.bound == "host"]
    launches_s = sum(kernel.runs for kernel in copies) * rated.launch_s
    assert copies_s < sum(kernel.seconds for kernel in copies) - launches_s < 1.1 * copies_s
    assert {kernel.part for kernel in copies} == {"optimizer"}
    assert not [kernel for kernel in near.program.roofline.kernels if kernel.bound == "host"]
    assert "on each host of 8 GPUs; their copies take" in report.memory_table(far)
    assert "S(5)" in far.program.text and "S(5)" not in near.program.text


def test_a_jax_that_cannot_mark_arguments_and_a_host_that_is_too_small_are_refused(monkeypatch):
    made = assembled(run_of("zero3", True))
    with monkeypatch.context() as patched:
        patched.setattr(jax, "local_devices", lambda: list(made.mesh.devices.flat))
        step_costs.check_memory(made)
        patched.setattr(devices, "machine_bytes", lambda: 2**20)
        with pytest.raises(ConfigError, match="the moments of 8 GPUs take .* of this host, which has 1"):
            step_costs.check_memory(made)
    monkeypatch.setattr(jax_private, "put_arguments_on_host", lambda lowered, numbers: None)
    with pytest.raises(ConfigError, match="optimizer.offload=true: jax .* cannot compile .* use another version of jax"):
        assembly.compile_step(made, made.program.lower_step())
