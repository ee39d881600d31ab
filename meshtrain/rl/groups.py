"""Groups of answers with their rewards, and the files in run.dir/rollouts that hold the newest batches of answers.

N.jsonl has prompts, answers and rewards as text, for people. N.npz has token ids and numbers, from which a killed run
resumes. Each file is complete or absent. A failed write does not stop the run.
"""
from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import json
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import jax
import numpy as np

from meshtrain import files
from meshtrain.cluster import agree
from meshtrain.config import Run
from meshtrain.inference.detokenizer import Words
from meshtrain.inference.generate import Completion, GenerationLimits
from meshtrain.inference.sampling import Picking
from meshtrain.rl.prompts import Prompt, Prompts
from meshtrain.rl.rewards import workers
from meshtrain.run import contents, say
from meshtrain.run.exits import RunError
from meshtrain.storage import mirror

ARRAYS = {"tokens", "logprobs", "margins", "rewards"}       # arrays of N.npz that are not scores
# Keys of [rl] that change neither the answers nor their rewards.
FREE = ("slots", "rules", "reward_workers", "reward_timeout_s", "reward_memory_gb", "reward_check", "keep")


class RolloutError(RunError):
    """The answers of a batch must not be used for training. All processes raise it together."""


@dataclasses.dataclass(eq=False)
class ScoredAnswer:
    """An answer with its reward. reward: NaN if there is none. parts: further values that the reward function returned,
    by name. failure: why there is no reward; "" if there is one."""
    drawn: Completion
    text: str
    reward: float
    parts: dict[str, float]
    failure: str


@dataclasses.dataclass(eq=False)
class Group:
    """The answers to one prompt. row: its number in the batch. unsteady: answers with two different rewards."""
    prompt: Prompt
    row: int
    answers: list[ScoredAnswer]
    unsteady: int = 0

    @property
    def equal(self) -> bool:
        """Whether all rewards of the group are equal, so that its advantages are zero. Missing rewards are ignored."""
        return len({answer.reward for answer in self.answers if not np.isnan(answer.reward)}) < 2


@dataclasses.dataclass(eq=False)
class AnswerBatch:
    """A batch of answers.

    drawn: number of prompts that the run has drawn up to this batch. equal: share of groups with equal rewards, among
    the groups that were sampled for the batch. version: of the weights that sampled the batch (number of batches that
    trained them). scores: name -> log-probabilities from the trainer's forward pass, float32 [updates, rows, T].
    """
    groups: list[Group]
    drawn: int
    equal: float
    version: int
    scores: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def answers(self) -> list[ScoredAnswer]:
        return [answer for group in self.groups for answer in group.answers]

    def numbers(self) -> dict[str, float]:
        """Return the columns of the metrics row."""
        if not (every := self.answers):
            return {"equal_groups": self.equal}
        there = [answer.reward for answer in every if not np.isnan(answer.reward)]
        lengths = [len(answer.drawn.tokens) for answer in every]
        def mean(values) -> float:
            return float(np.mean(values)) if len(values) else 0.0
        failures = [answer.failure for answer in every if answer.failure]
        return {"reward": mean(there), "reward_std": float(np.std(there)) if len(there) else 0.0,
                **{f"reward/{name}": value for name, value in means(every).items()},
                "equal_groups": self.equal, "answer_tokens": mean(lengths), "answer_tokens_max": float(max(lengths)),
                "truncated": mean([answer.drawn.stopped == "length" for answer in every]),
                "reward_failed": float(len(failures)),
                "reward_timeouts": float(sum(failure.startswith(workers.TIMEOUT) for failure in failures)),
                "reward_unsteady": float(sum(group.unsteady for group in self.groups))}


def means(answers: Sequence[ScoredAnswer]) -> dict[str, float]:
    """Return the mean of each part of the reward, by name, over the answers that have the part."""
    return {name: float(np.mean([answer.parts[name] for answer in answers if name in answer.parts]))
            for name in sorted({name for answer in answers for name in answer.parts})}


class KeptBatches:
    """The files in run.dir/rollouts that keep the newest batches of a run. directory: run.dir."""

    def __init__(self, run: Run, prompts: Prompts, directory: Path):
        self.run, self.prompts, self.directory = run, prompts, directory / contents.ROLLOUTS
        self._of_reward = workers.digest(run.rl.reward)     # of the file before the workers start; it may be edited

    def of(self, number: int) -> Kept:
        """Return the file of batch `number`. Its key covers all that determines the batch but the weights."""
        run = self.run
        identity = [number, run.run.seed, run.rl.model_dump(exclude=set(FREE)), run.data.seq_len,
                    run.data.global_batch, run.model.model_dump(), run.lora.model_dump(), self.prompts.digest,
                    self._of_reward]
        key = hashlib.blake2b(json.dumps(identity).encode(), digest_size=10).hexdigest()
        return Kept(self.directory, number, key)


@dataclasses.dataclass(frozen=True)
class Kept:
    """The file that keeps a batch of answers for a resumed run. number: the batch's number. key: hash of everything
    that the answers depend on, except the weights."""
    directory: Path
    number: int
    key: str

    @property
    def path(self) -> Path:
        return self.directory / f"{self.number}.npz"

    def write(self, batch: AnswerBatch, weights: str, most: int) -> None:
        """Write the batch and remove all but the newest `most` batches. A failed write is reported: a resumed run then
        samples the same answers again. weights: the checksum of the weights."""
        groups, every = batch.groups, batch.answers
        said, arrays = flat([answer.drawn for answer in every])
        told = {"key": self.key, "weights": weights, "version": batch.version, "drawn": batch.drawn,
                "equal": batch.equal, **said,
                "samples": [len(group.answers) for group in groups], "rows": [group.row for group in groups],
                "parts": [answer.parts for answer in every], "failures": [answer.failure for answer in every],
                "unsteady": [group.unsteady for group in groups]}
        rewards = np.array([answer.reward for answer in every], np.float64)
        content = pack_arrays(told, arrays | {"rewards": rewards} | batch.scores)

        def place() -> None:
            self.directory.mkdir(exist_ok=True)
            files.replace(self.path, content)
            files.replace(self.path.with_suffix(".jsonl"), _text(groups, batch.version))
            _drop_before(self.directory, self.number - most + 1)
        _quietly(place)

    def hold(self, drawn: Sequence[Completion], weights: str) -> None:
        """Save answers that have no rewards yet; `write` replaces them. weights: checksum of the sampling weights."""
        told, arrays = flat(drawn)
        content = pack_arrays({"key": self.key, "weights": weights, "held": True, **told}, arrays)

        def place() -> None:
            self.directory.mkdir(exist_ok=True)
            files.replace(self.path, content)
        _quietly(place)

    def read_held(self, weights: str | None) -> list[Completion]:
        """Return the answers that `hold` saved; [] if their key or weights differ. All processes call it together."""
        content = unpack_arrays(self.path)
        fit = all(agree.exchange(self._fits(content, weights, held=True)))
        return unflat(*content) if content is not None and fit else []

    def read(self, weights: str | None, first: int, prompts: Prompts, words: Words) -> AnswerBatch | None:
        """Return the batch; None if it is missing in a process, or its key or weights differ. All processes call this.

        weights: the expected checksum; None accepts any weights. first: number of prompts drawn for earlier batches.
        """
        content = unpack_arrays(self.path)
        fit = all(agree.exchange(self._fits(content, weights)))
        if content is None or not fit:
            return None
        told, arrays = content
        values = zip(unflat(told, arrays), arrays["rewards"], told["parts"], told["failures"], strict=True)
        groups = []
        for row, samples, unsteady in zip(told["rows"], told["samples"], told["unsteady"], strict=True):
            (prompt,) = prompts.draw(first + row, 1)
            answers = [ScoredAnswer(dataclasses.replace(drawn, prompt=prompt.ids.tolist()), words.text(drawn.tokens),
                                    float(reward), parts, failure)
                       for drawn, reward, parts, failure in itertools.islice(values, samples)]
            groups.append(Group(prompt, row, answers, unsteady))
        return AnswerBatch(groups, told["drawn"], told["equal"], told["version"],
                           {name: arrays[name] for name in arrays.keys() - ARRAYS})

    def find(self, weights: str) -> tuple[dict, dict] | None:
        """Return (JSON object, arrays) of the batch here; None if it is missing, or its key or weights differ."""
        content = unpack_arrays(self.path)
        return content if self._fits(content, weights) else None

    def _fits(self, content: tuple[dict, dict] | None, weights: str | None, held: bool = False) -> bool:
        return (content is not None and content[0]["key"] == self.key and weights in (None, content[0]["weights"])
                and content[0].get("held", False) == held)


class Completer(Protocol):
    """An object that completes the prompts of a batch: a `Generator` or a replacement for one."""

    def complete(self, prompts: Sequence[Sequence[int]], limits: GenerationLimits, how: Picking, seed: int, *,
                 samples: Sequence[int], counters: Sequence[tuple[int, int]],
                 each: Callable[[int, Completion], None]) -> list[Completion]:
        """Return answers; see `Generator.complete`."""


@dataclasses.dataclass(eq=False)
class HeldFirst:
    """A `Completer` that first returns the answers that `Kept.hold` saved of an interrupted batch."""
    held: list[Completion]
    generator: Completer

    def complete(self, prompts: Sequence[Sequence[int]], limits: GenerationLimits, how: Picking, seed: int, *,
                 samples: Sequence[int], counters: Sequence[tuple[int, int]],
                 each: Callable[[int, Completion], None]) -> list[Completion]:
        count = sum(samples)
        if len(self.held) < count:
            return self.generator.complete(prompts, limits, how, seed, samples=samples, counters=counters, each=each)
        of = [prompt for prompt, n in zip(prompts, samples, strict=True) for _ in range(n)]
        answers = [dataclasses.replace(answer, prompt=list(prompt))
                   for answer, prompt in zip(self.held[:count], of, strict=True)]
        del self.held[:count]
        for i, answer in enumerate(answers):
            each(i, answer)
        return answers


def flat(answers: Sequence[Completion]) -> tuple[dict, dict]:
    """Convert answers, without their prompts, to (a JSON object, arrays)."""
    def values(name: str, dtype) -> np.ndarray:
        return np.array([value for answer in answers for value in getattr(answer, name)], dtype)
    return ({"stopped": [answer.stopped for answer in answers], "lengths": [len(answer.tokens) for answer in answers]},
            {"tokens": values("tokens", np.int32), "logprobs": values("logprobs", np.float32),
             "margins": values("margins", np.float32)})


def unflat(told: dict, arrays: dict) -> list[Completion]:
    """Convert the output of `flat` back to answers. Their prompts are empty."""
    ends = np.cumsum(told["lengths"], dtype=int)        # dtype: an empty list would give floats
    each = zip(*(np.split(arrays[name], ends)[:-1] for name in ("tokens", "logprobs", "margins")), told["stopped"],
               strict=True)
    return [Completion([], tokens.tolist(), stopped, logprobs.tolist(), margins.tolist())
            for tokens, logprobs, margins, stopped in each]


def pack_arrays(told: dict, arrays: dict) -> bytes:
    """Return the content of an npz file with a JSON object and arrays; see `unpack_arrays`."""
    content = io.BytesIO()
    np.savez(content, told=np.frombuffer(json.dumps(told).encode(), np.uint8), **arrays)
    return content.getvalue()


def unpack_arrays(path: Path | io.BytesIO) -> tuple[dict, dict] | None:
    """Return (JSON object, arrays) of a file; None if it is missing or damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        return json.loads(arrays.pop("told").tobytes()), arrays
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _text(groups: Sequence[Group], version: int) -> bytes:
    lines = [{**answer.parts, "prompt": group.prompt.text, "place": group.prompt.place, "version": version,
              "answer": answer.text, "tokens": len(answer.drawn.tokens), "stopped": answer.drawn.stopped,
              "reward": None if np.isnan(answer.reward) else answer.reward,
              **({"failure": answer.failure} if answer.failure else {})}
             for group in groups for answer in group.answers]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode(errors="surrogatepass")


def _drop_before(directory: Path, first: int) -> None:
    for path in directory.iterdir():
        if path.suffix in (".npz", ".jsonl") and path.stem.isdigit() and int(path.stem) < first:
            mirror.remove(path)


def _quietly(write: Callable[[], None]) -> None:
    """Call `write` in process 0. A failure is reported and does not stop the run."""
    if jax.process_index():
        return
    try:
        write()
    except OSError as error:
        say.err(f"the answers could not be saved ({files.describe(error)}); the run continues without them")
