"""DPO's log-probability margins of the reference model, computed once for all pairs before training.

The reference model has the weights that the run starts from. The margins are cached next to the tokens of the pairs,
under a hash of weights and pairs, so that other runs from the same weights (e.g. with another beta) reuse them. run.dir
has a copy for resumes, because the weights have changed by then.
"""
from __future__ import annotations

import contextlib
import hashlib
import io
import json
import time
from pathlib import Path

import numpy as np

from meshtrain import files
from meshtrain.cluster import agree
from meshtrain.config import ConfigError, Run
from meshtrain.data.batches.preferences import PairValidation, Pairs
from meshtrain.data.files import token_files
from meshtrain.data.sources import Corpus
from meshtrain.run import contents, replicas, say
from meshtrain.training.step import Program

FILE = contents.REFERENCE   # in run.dir: float32 [pairs]; NaN for a pair that is too long


def with_references(run: Run, program: Program, pairs: Pairs, corpus: Corpus, directory: Path,
                    params: dict | None) -> Pairs:
    """Return the pairs with the margins of the reference model. All processes call this together.

    params: the reference's weights; None if the run resumes; then the margins are read from run.dir. directory:
    run.dir. Raises: ConfigError if the margins in run.dir are missing or damaged.
    """
    count = pairs.source.num_documents // 2
    if params is None:
        values = _read(directory / FILE, count)
        if values is None:
            raise ConfigError(f"{directory / FILE}, the log-probabilities of the reference, is missing or damaged. "
                              f"No checkpoint has the reference's weights; restore the file, or start a new run with "
                              f"another run.name")
        return pairs.with_references(values)
    shared = Path(corpus.sources[0].pairs[0].path).parent / f"reference-{_key(run, corpus, pairs, params)}.npy"
    values, began = _read(shared, count), time.perf_counter()
    if any(agree.exchange(values is None)):     # caches of hosts may differ, and all processes compute together
        values = _compute(program, pairs, count, params)
        say.out(f"computed the reference's log-probabilities of {len(pairs.all_pairs)} pairs in "
                f"{time.perf_counter() - began:.1f} s, saved as {shared}")
    else:
        say.out(f"read the reference's log-probabilities of {len(pairs.all_pairs)} pairs from {shared}")
    agree.on_first(lambda: _write(values, directory / FILE, shared))
    return pairs.with_references(values)


def _compute(program: Program, pairs: Pairs, count: int, params: dict) -> np.ndarray:
    scores = program.compile_function(program.scores, program.step.state.abstract.params, program.step.batch)
    every = PairValidation(pairs.source, pairs.all_pairs, pairs.seq_len, pairs.global_batch)
    of_batches = [np.asarray(scores(params, program.place(every.batch(i, program.rows)))).reshape(-1)
                  for i in range(every.num_batches)]
    values = np.full(count, np.nan, np.float32)
    values[pairs.all_pairs] = np.concatenate(of_batches)[:len(pairs.all_pairs)]
    return values


def _key(run: Run, corpus: Corpus, pairs: Pairs, params: dict) -> str:
    """Return a hash of everything that the margins depend on: weights, pairs, and the model's settings."""
    model = {name: value for name, value in run.model.model_dump().items() if not name.endswith("_dropout")}
    manifests = [pair.path.removesuffix(token_files.TOKENS) + ".json" for pair in corpus.sources[0].pairs]
    tokens = agree.on_first(lambda: [json.loads(Path(path).read_text(encoding="utf-8"))["crc32"] for path in manifests])
    identity = [replicas.digest(params), tokens, corpus.fingerprint, pairs.seq_len, model,
                run.lora.model_dump(exclude={"export"})]
    return hashlib.blake2b(json.dumps(identity).encode(), digest_size=10).hexdigest()


def _read(path: Path, count: int) -> np.ndarray | None:
    def read():
        try:
            values = files.patiently(lambda: np.load(path, allow_pickle=False))
        except OSError as error:
            if path.name == FILE and not files.is_mistake(error):       # it exists, and a resumed run has no other copy
                raise files.error_to_raise(error, f"{path} cannot be read", "") from None
            return None
        except (ValueError, EOFError):
            return None
        return values.tolist() if values.shape == (count,) and values.dtype == np.float32 else None
    values = agree.on_first(read)
    return None if values is None else np.array(values, np.float32)


def _write(values: np.ndarray, own: Path, shared: Path) -> None:
    content = io.BytesIO()
    np.save(content, values, allow_pickle=False)
    files.attempt(lambda: files.replace(own, content.getvalue()), f"{own} cannot be written", "give another run.dir",
                  ConfigError)
    with contextlib.suppress(OSError):
        files.replace(shared, content.getvalue(), shared=True)
