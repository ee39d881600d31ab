"""The hardware table is complete, in the right units, and finds GPUs by the names that drivers give."""
import dataclasses

import pytest

from meshtrain import config, devices
from meshtrain import hardware
from meshtrain.cost.formulas.assumptions import Assumptions
from meshtrain.cost.formulas.options import Options
from meshtrain.cost.formulas.place import place
from meshtrain.cost.formulas.price import stage_costs
from meshtrain.cost.formulas.rates import Rates
from meshtrain.cost.program import compile
from meshtrain.kernels import tiles
from meshtrain.model import transformer
from meshtrain.names import AXES, PLACEMENT
from meshtrain.sharding import rules
from meshtrain.sharding.mesh import MeshSpec
from meshtrain.sharding.rules import Layout

PROMISED = "a100-40gb a100-80gb h100 h100-pcie h100-96gb h200 b200 gb200 b300 gb300 mi300x mi325x cpu".split()


def test_table_holds_the_promised_names():
    assert set(PROMISED) <= set(hardware.GPUS)


def test_one_row_makes_a_gpu_known_to_drivers_the_planner_the_compiler_and_the_kernels(monkeypatch):
    h100 = hardware.get("h100")
    h300 = dataclasses.replace(h100, name="h300", hbm_bytes=192 * 10**9, hbm_bytes_per_s=5e12, product="",
                               peak_flops={dtype: 1.2 * peak for dtype, peak in h100.peak_flops.items()})
    with pytest.raises(ValueError, match="unknown GPU 'h300'"):
        compile.parse_topology("h300:8")
    monkeypatch.setitem(hardware.GPUS, "h300", h300)
    assert hardware.get("h300") is h300 is hardware.from_device_kind("NVIDIA H300") and "h300" in hardware.list_priced()
    assert compile.parse_topology("h300:8") == ("h300", 8)
    assert "device_memory_size: 192000000000\n" in (spec := compile.target_spec("h300"))
    assert 'device_description_str: "NVIDIA H300"' in spec
    assert tiles.of(128, "h300") == tiles.of(128, "h100") and Assumptions("h300")["matmul.best"] == .803


@pytest.mark.parametrize("name", hardware.list_priced())
def test_every_number_of_an_accelerator_is_known_sourced_and_of_plausible_size(name):
    gpu = hardware.get(name)
    assert gpu.source and gpu.inter_host_source
    assert 1e14 < gpu.peak("bfloat16") == gpu.peak("float16") < 1e16
    assert gpu.peak("float32") < gpu.peak("bfloat16") / 7        # the plain pipes, no tf32
    assert gpu.peak("float8") in (None, pytest.approx(2 * gpu.peak("bfloat16"), rel=0.01))  # dense, not sparse
    assert 40e9 < gpu.hbm_bytes < 300e9
    # Each tier is slower than the one inside it.
    assert gpu.hbm_bytes_per_s > gpu.intra_host_bytes_per_s > gpu.inter_host_bytes_per_s > 10e9
    assert (gpu.gpus_per_host, gpu.gpus_per_link_domain) in ((8, 8), (4, 72))
    assert gpu.gpus_per_link_domain % gpu.gpus_per_host == 0


def test_numbers_that_the_field_knows_by_heart():
    assert hardware.get("a100-80gb").peak("bf16") == 312e12
    assert round(hardware.get("h100").peak("bf16") / 1e12) == 989
    assert hardware.get("h100-96gb").hbm_bytes_per_s == 2.4e12
    assert hardware.get("a100-40gb").peak("float8") is None


def test_a_run_takes_092_of_a_gpus_memory_unless_the_environment_says_another_share(monkeypatch):
    monkeypatch.setattr(devices.xla_flags, "find_known", set)
    h100, (new, old) = hardware.get("h100"), hardware.MEMORY_VARIABLES
    for given, share in (({}, 0.92), ({new: "0.5"}, 0.5), ({old: ".75"}, 0.75), ({new: ""}, 0.92)):
        assert hardware.usable_bytes(h100, given) == int(share * h100.hbm_bytes)
        taken = dict(given)
        devices.prepare_gpus(taken)
        said = [value for value in (taken.get(new), taken.get(old)) if value]
        assert len(said) == 1 and float(said[0]) == share, "jax refuses both at once"
    for wrong in ("0", "1.1", "75%", "nan", "-0.5"):
        with pytest.raises(config.ConfigError, match=f"{old}={wrong}.*0.92"):
            devices.prepare_gpus({old: wrong})


def test_cpu_has_no_peak():
    cpu = hardware.get("cpu")
    assert cpu.peak("bfloat16") is None and cpu.hbm_bytes is None


@pytest.mark.parametrize("wrong, near", [("h10", "h100"), ("A100-80G", "a100-80gb"), ("mi300", "mi300x")])
def test_unknown_name_offers_the_nearest(wrong, near):
    with pytest.raises(ValueError, match=f"unknown GPU '{wrong}'; did you mean '{near}'"):
        hardware.get(wrong)


@pytest.mark.parametrize(
    "kind, name",
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100", "h100-96gb"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB300", "gb300"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI325X", "mi325x"),
        ("cpu", "cpu"),
    ],
)
def test_device_kind_is_recognized(kind, name):
    assert hardware.from_device_kind(kind) is hardware.get(name)


@pytest.mark.parametrize("name", hardware.GPUS)
def test_every_gpu_is_recognized_by_the_name_that_its_row_gives(name):
    assert hardware.from_device_kind(hardware.get(name).device_kind) is hardware.get(name)


@pytest.mark.parametrize("kind", [
    "NVIDIA GeForce RTX 4090", "NVIDIA H100 NVL", "TPU v5 lite", "gfx942", "AMD Instinct MI300A", "",
])  # fmt: skip
def test_device_that_is_not_in_the_table_is_none(kind):
    assert hardware.from_device_kind(kind) is None


@pytest.mark.parametrize("name, num_tensor, bytes_per_s", [
    ("gb200", 16, 900e9), ("gb200", 72, 50e9), ("gb300", 8, 900e9), ("gb300", 72, 100e9),
    ("b200", 4, 900e9), ("b200", 8, 50e9),
])  # fmt: skip
def test_stages_are_priced_at_the_link_of_their_domain_not_of_their_host(name, num_tensor, bytes_per_s):
    """Two stages, `num_tensor` GPUs apart: within a rack of 72, or a host of 8, over NVLink."""
    run = config.Run(model=dict(embed_dim=1024, compute_dtype="bfloat16"), data=dict(seq_len=512, global_batch=8))
    mesh_spec = MeshSpec({axis: 1 for axis in AXES} | dict(stage=2, tensor=num_tensor), PLACEMENT)
    gpu = hardware.get(name)
    rated = Rates(gpu, Assumptions(name, {"link.share": 1, "nic.share": 1, "link.start_us": 0,
                                          "link.hop_us": 0, "link.host_hop_us": 0}))
    placed = place(transformer.build(run.model).parameters(), run.model,
                   Layout(rules.parse(""), mesh_spec.sizes), mesh_spec)
    assert stage_costs(placed, rated, Options.of(run)).link_s == pytest.approx(8 * 512 * 1024 * 2 / bytes_per_s)
