"""Runs that begin from the golden model folders, for the tests of weights."""
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import safetensors as published

from meshtrain import assembly, config, run_files
from meshtrain.huggingface import safetensors
from meshtrain.huggingface.weights import pretrained

ROOT = Path(__file__).resolve().parent
GOLDENS = ROOT / "goldens"
NAMES = sorted(path.parent.name for path in GOLDENS.glob("*/golden.npz"))
EIGHT = ("zero3", dict(data=2, fsdp=2, tensor=2))
ONE = ("ddp", {})
B = 8


def run_of(source: Path, rule: str, mesh: dict, *words: str) -> config.Run:
    """Tokens come from files that nobody reads: bytes would need a larger vocabulary."""
    values = {"sharding.rules": ROOT.parent / f"sharding_rules/{rule}.toml", "mesh.simulated_devices": 0,
              "mesh.data": 1, "mesh.fsdp": 1,
              "mesh.tensor": 1, "data.source": "tokens", "data.paths": '["none.tokens.npy"]', "data.seq_len": 40,
              "data.global_batch": B, "training.microbatches": 1, "model.compute_dtype": "float32",
              "checkpoint.init_from": source}
    values |= {f"mesh.{axis}": size for axis, size in mesh.items()}
    return run_files.load([f"--{key}={value}" for key, value in values.items()] + list(words))


class Loaded:
    """A run of a model folder, put together, with its parameters as they were read."""

    def __init__(self, source: Path, rule: str, mesh: dict, *words: str):
        self.run = run_of(source, rule, mesh, *words)
        self.made = assembly.assemble(self.run, jax.devices()[:math.prod(mesh.values())])
        spec = self.made.program.step.state
        self.found, self.rows = pretrained.open_folder(self.run, self.made.model)
        # Other numbers than zeros: what is not overwritten shows.
        full = jax.jit(lambda: jax.tree.map(lambda a: jnp.full(a.shape, 7, a.dtype), spec.abstract.params),
                       out_shardings=spec.sharding.params)
        with jax.set_mesh(self.made.mesh):
            self.params = pretrained.load(self.found, self.rows, self.made.model.places(), full())

    def logits(self, tokens_BT, documents: int = 1) -> np.ndarray:
        """[B, T·documents, V] of rows that hold each sequence so many times, as documents of their own."""
        made, length = self.made, tokens_BT.shape[1] * documents
        order = np.arange(length) if made.program.step.order is None else made.program.step.order
        tokens = np.resize(np.tile(tokens_BT, documents), (B, length))
        index = np.tile(np.arange(length), (B, 1))
        batch = {"tokens": tokens, "positions": index % tokens_BT.shape[1], "index": index,
                 "segments": 1 + index // tokens_BT.shape[1]}
        batch = {name: a[:, order] for name, a in batch.items()} | {"sequence": np.arange(B)}

        @jax.jit
        def every(params, batch):
            params = made.model.as_read(made.layout, params, jnp.float32)
            ex = made.program.step.ex
            return made.model.head_logits(ex, params, made.model.through_layers(ex, params, batch))[
                :, jnp.argsort(order)]

        with jax.default_matmul_precision("highest"), jax.set_mesh(made.mesh):
            return np.asarray(every(self.params, batch))[:len(tokens_BT)]


def contents(directory: Path) -> dict[str, tuple]:
    """Name -> (dtype, shape, bytes) of every tensor of a folder, as the published library has them; ours reads the same.
    """
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        own = {name: (entry.dtype, entry.shape, safetensors.read(entry, 0, math.prod(entry.shape)).tobytes())
               for name, entry in safetensors.read_header(path).items()}
        theirs = {name: (one["dtype"], tuple(one["shape"]), bytes(one["data"]))
                  for name, one in published.deserialize(path.read_bytes())}
        assert own == theirs
        found |= theirs
    return found
