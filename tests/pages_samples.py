"""Dicts as the commands print them, for tests of their pages, as large and as hostile as wanted."""
import math

from meshtrain.names import AXES, PLACEMENT

HOSTILE = """</script><script>document.title="owned"</script><img src=x onerror="document.title='owned'"> ' " & <!--"""


def inspected(sizes=None, params=12, name="a run", gpu="h100", per_host=8) -> dict:
    """Of `inspect --json`, with made-up numbers: each of its own, so that one that is missing on a page is missed."""
    sizes = dict.fromkeys(AXES, 1) | (sizes or {"data": 2, "fsdp": 4})
    count, inner, links = math.prod(sizes.values()), 1, {}
    for axis in reversed(PLACEMENT):
        inside = min(sizes[axis], max(1, per_host // inner))
        inner *= sizes[axis]
        if sizes[axis] > 1:
            links[axis] = {"size": sizes[axis], "inside": inside}
    numbers = iter(range(10**9 + 7, 10**10, 987_654))
    held = lambda *names: {name: next(numbers) for name in names}
    compiled = held("params", "grads", "optimizer", "activations")
    collective = lambda kind, axes: {"kind": kind, "axes": axes, "count": next(numbers) % 9973, "bytes": next(numbers),
                                     "dtype": "f32", "source": f"{name}/dot"}
    axes = list(links)
    return {
        "run": {"name": name, "num_params": 1_234_567_891, "num_layers": 16, "steps": 100,
                "global_batch": 64, "seq_len": 4096,
                "tokens_per_step": 262144, "microbatches": 2, "remat": "none", "compute_dtype": "bfloat16",
                "matmul_dtype": "auto", "optimizer": "adamw",
                "context_method": None, "rules": f"{name}.toml", "rules_text": f"# {name}"},
        "mesh": {"sizes": sizes, "placement": list(PLACEMENT), "num_devices": count, "device": "NVIDIA H100 80GB HBM3",
                 "simulated": gpu is None, "gpu": gpu, "hbm_bytes": gpu and 84_942_979_072, "gpus_per_host": per_host,
                 "gpus_per_link_domain": 8, "links": links},
        "parameters": [{"name": f"layers/{k}/{name}", "axes": ["embed", None], "shape": [k + 1, 8], "size": 8 * (k + 1),
                        "bytes": 32 * (k + 1), "dtype": "float32", "read": [[], []], "stored": [["data", "fsdp"], []],
                        "grads": [[], []], "stored_bytes": next(numbers), "grads_bytes": next(numbers)}
                        for k in range(params)],
        "memory_bytes": {"compiled": compiled | {"total": sum(compiled.values()) + 10**8},
                         "formula": held("params", "grads", "optimizer") | {"activations": None, "total": None},
                         "usable": gpu and 78_147_540_746},
        "recomputed_by_xla": 3, "broken_permutes": [f"no zeros, please: {name}"],
        "collectives": {"formula": [collective("all-gather", axes[:1]), collective("all-to-all", axes[:1])]
                        if axes else None,
                        "compiled": [
            collective("all-gather", axes[:1]), collective("all-reduce", axes)] if axes else []},
        "matmul_flops": {"formula": 123_000_000_000_000, "compiled": 234_500_000_000_000},
        "warnings": [f"gathered in a loop: {name}"], "differences": [f"matmuls differ: {name}"],
        "roofline": gpu and _roofline(name, axes, count, numbers), "schedule": None, "notes": [name]}


def _roofline(name, axes, count, numbers) -> dict:
    second = lambda: next(numbers) / 1e10
    kernel = lambda: {"name": "gemm", "part": "matmul", "source": name, "line": "model/layers.py:1",
                      "count": next(numbers) % 997, "time_s": second(),
                      "flops": next(numbers), "bytes": next(numbers), "bound": "FLOPs",
                      "instructions": ["gemm"]}
    traffic = lambda: {"kind": "all-gather", "axes": axes[:1], "runs": 7, "sent_bytes": next(numbers),
                       "seconds": second(),
                       "exposed_s": second(), "hidden_under": {"matmul": second()}}
    return {"gpu": "h100", "num_gpus": count, "step_time_s": 2.5, "tokens_per_s": 104857.6,
            "mfu": 0.4321, "mfu_dtype": "bfloat16",
            "compute_s": 2.0, "communication_s": 0.6, "exposed_s": 0.2, "exposed_s_by_axes": {},
            "hidden_s": 0.4, "free_matmul_s": 1.1,
            "share": {"attention": 0.1, "matmul": 0.6, "elementwise": 0.1, "optimizer": 0.02, "other": 0.18},
            "other": {"communication": 0.08, "contention": 0.06, "host": 0.04},
            "traffic": [traffic()], "kernels": [kernel() for _ in range(30)], "unknown_loops": [name], "uncounted": [],
            "assumed": {"matmul.sustained": 0.84}}
