"""The run file of tests that start real processes: a model whose steps take hundredths of a second, on bytes of a
text."""
import json

TINY = {
    "run.sample_tokens": 0, "mesh.data": 2, "mesh.simulated_devices": 2, "model.vocab_size": 257, "model.embed_dim": 32,
    "model.num_layers": 1, "model.num_heads": 2, "model.mlp_dim": 64, "model.compute_dtype": "float32",
    "data.source": "text",
    "data.seq_len": 32, "data.global_batch": 8, "training.steps": 1_000_000, "optimizer.schedule": "constant"}


def text(**keys) -> str:
    """TINY with other values or more keys: section__key=value."""
    sections: dict[str, list[str]] = {}
    for name, value in (TINY | {name.replace("__", "."): value for name, value in keys.items()}).items():
        section, key = name.split(".")
        sections.setdefault(section, []).append(f"{key} = {json.dumps(value)}")
    return "\n".join("\n".join([f"[{section}]", *lines]) for section, lines in sections.items()) + "\n"
