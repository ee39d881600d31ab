"""The feed of training.objective = "rl": draws answers to prompts, has them scored, and makes batches of them.

Batch n of answers is a function of the settings, n and the weights after n · rl.updates steps: keys of draws are
counters, and nothing depends on time, order or layout. Every process draws all answers, scores its share, and packs the
same rows. run.dir/rollouts keeps the newest batches: as text, and as arrays with which a killed run goes on without
drawing again, and with the rewards it had.
"""
from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from meshtrain import files, rewards
from meshtrain.cluster import agree, watch
from meshtrain.config import ConfigError, Run, user_errors
from meshtrain.data.batches import answers
from meshtrain.data.batches.prompts import Prompt, Prompts
from meshtrain.inference.detokenizer import Words
from meshtrain.inference.generate import Completion, GenerationLimits
from meshtrain.inference.sampling import Picking
from meshtrain.names import NO_TARGET
from meshtrain.run import contents, replicas, say
from meshtrain.run.loop import Given
from meshtrain.run.record import Record
from meshtrain.training.state import State
from meshtrain.training.step import Program

VALIDATION = 2**32 - 1      # the batch of the keys of validations: each draws with the same noise
MOST_FAILURES = 0.1         # of a batch's answers, whose scores failed, before the run ends
ROUNDS = 3                  # of prompts that rl.filter draws for a batch
SCORES = ("old", "reference")       # log-probabilities by the trainer's forward pass, fields of a batch
# Keys of [rl] that change neither what is drawn nor what it is worth.
FREE = ("slots", "rules", "reward_workers", "reward_timeout_s", "reward_memory_gb", "reward_check", "keep")


class RolloutError(RuntimeError):
    """Answers that nothing should be learned from. Every process raises it alike."""


@dataclasses.dataclass(eq=False)
class Group:
    """The answers to one prompt. row: of the prompt in the batch. text: of each answer. rewards: float64 [samples], nan where there is none. parts: of each
    answer, further values of its reward by name. failures: of each, why it has no reward; empty: it has one."""
    prompt: Prompt
    row: int
    answers: list[Completion]
    text: list[str]
    rewards: np.ndarray
    parts: list[dict]
    failures: list[str]
    unsteady: int = 0       # answers whose reward was another the second time

    @property
    def equal(self) -> bool:
        """Whether nothing can be learned of it: all rewards that there are are the same."""
        there = self.rewards[~np.isnan(self.rewards)]
        return len(there) < 2 or bool((there == there[0]).all())


class Rollouts:
    """A feed (loop.Feed) and its data. words: text of ids, with the tokens that end an answer. sampler:
    `generator(params)` gives a Generator with these weights. record: of the run, set before the loop begins. position:
    of the checkpoint that the run resumes from. reference: the weights that rl.kl is measured to.

    Raises: ConfigError where the answers may not fit in a batch, or the reward cannot be used.
    """

    validation = ()     # there are no batches with a loss; see `validate`

    def __init__(self, run: Run, program: Program, prompts: Prompts, words: Words, sampler, directory: Path,
                 position: dict | None = None):
        self.run, self.rl, self.program, self.prompts, self.words = run, run.rl, program, prompts, words
        self.sampler, self.directory = sampler, directory / contents.ROLLOUTS
        self.record: Record | None = None
        self.reference: dict | None = None
        self._marks = [(position["batches"], position["tokens"], position["drawn"]) if position else (0, 0, 0)]
        self._held: tuple[int, list[dict], int] | None = None       # number of the batch, its parts, prompts drawn then
        self._score: Callable | None = None
        self._check_rows()
        rl = self.rl
        with user_errors():
            rewards.check(rl.reward, prompts.prompts[0].line)
            self.scorer = rewards.Scorer(rl.reward, rl.reward_workers, rl.reward_timeout_s, rl.reward_memory_gb,
                                         rl.reward_check)

    def _check_rows(self) -> None:
        count = self.rl.prompts * self.rl.samples // self.rl.updates
        longest = self.prompts.longest + self.rl.max_tokens - 1
        needed = answers.needed_rows(count, longest, self.run.data.seq_len)
        if needed > self.run.data.global_batch:
            raise ConfigError(
                f"data.global_batch={self.run.data.global_batch} sequences of data.seq_len={self.run.data.seq_len} may "
                f"not hold the {count} answers of a step (rl.prompts × rl.samples / rl.updates), each with its prompt "
                f"of up to {longest} tokens; use data.global_batch={needed} or more, of which only those are computed "
                f"that are needed, by training.microbatches")

    def close(self) -> None:
        self.scorer.close()

    def tokens(self, steps: int) -> int:
        return self._mark(steps)[1]

    def position(self, steps: int) -> dict:
        _, tokens, drawn = self._mark(steps)
        return {"batches": steps, "packing": "answers", "tokens": tokens, "drawn": drawn}

    def _mark(self, steps: int) -> tuple[int, int, int]:
        """(steps, tokens in their batches, prompts drawn for the batches of answers that are used up by then)."""
        return next(mark for mark in reversed(self._marks) if mark[0] <= steps)

    def next(self, done: int, state: State) -> Given:
        number, part = divmod(done, self.rl.updates)
        if fresh := self._held is None or self._held[0] != number:
            self._held = None       # of the step's memory, nothing stays with the sampler
            self._held = number, *self._batch(number, part, state)
        _, parts, drawn = self._held
        batch = parts[part]
        tokens = self._computed(batch)
        _, tokens_before, drawn_before = self._mark(done)
        self._marks = [*self._marks[-64:], (done + 1, tokens_before + tokens,
                                            drawn if part + 1 == self.rl.updates else drawn_before)]
        rows = {name: x[self.program.rows] for name, x in batch.items()}
        return Given(self.program.place(rows), tokens, fresh)

    # ---- one batch of answers ----------------------------------------------------------------------------------------

    def _batch(self, number: int, part: int, state: State) -> tuple[list[dict], int]:
        """(the parts of batch `number`, a step each; prompts drawn by then). state: after the steps before `part`."""
        self.record.settle()        # the row of the step before: the numbers that follow are of the next
        kept = _Kept(self.directory, number, self._key(number))
        weights = self._checksum(state.params) if part == 0 else None
        first = self._mark(number * self.rl.updates + part)[2]
        found = kept.read(weights, first, self.prompts, self.words)
        if found is None and part:
            say.err(f"{kept.path} is gone or damaged, with the answers that the steps before this one learned from; "
                    f"they are drawn again, with the weights of now")
        groups, drawn, scores = found or (*self._drawn(number, first, state), {})
        parts = self._packed(groups, number * self.rl.updates)
        if missing := [name for name in SCORES if name in self.program.step.batch and name not in scores]:
            scores = dict(scores)
            with self._timed("sampling", "score_s"):
                for name in missing:
                    params = state.params if name == "old" else self.reference
                    scores[name] = np.stack([self._scored(params, batch) for batch in parts])
        for name, values in scores.items():
            for batch, values_BT in zip(parts, values, strict=True):
                batch[name] = values_BT
        if found is None:
            kept.write(groups, drawn, scores, weights or "")
            self._keep_text(number, groups)
        self.record.add(self._numbers(groups))
        return parts, drawn

    def _drawn(self, number: int, first: int, state: State) -> tuple[list[Group], int]:
        """(groups of batch `number`, prompts drawn by then); `first` of them before."""
        with self._timed("sync", "sync_s"):
            generator = self.sampler.generator(state.params)
            jax.block_until_ready(generator.params)
        groups, wanted, equal, row = [], self.rl.prompts, 0, 0
        for _ in range(ROUNDS if self.rl.filter == "equal" else 1):
            prompts = self.prompts.draw(first + row, wanted - len(groups))
            counters = [(number, row + i) for i in range(len(prompts))]
            found = self._answered(generator, prompts, self.rl.samples, counters, self._timed)
            row += len(prompts)
            equal += sum(group.equal for group in found)
            groups += found if self.rl.filter == "none" else [group for group in found if not group.equal]
            if len(groups) == wanted:
                break
        if not groups:
            say.out(f"batch {number}: in {row} groups of answers all rewards are equal, and nothing can be learned of "
                    f"them; give easier or harder prompts, or another reward")
        self.record.add({"equal_groups": equal / row})
        return groups, first + row

    @contextlib.contextmanager
    def _timed(self, part: str, column: str) -> Iterator[None]:
        """Between two steps: seconds of a part of the goodput account, and of a column of the metrics row."""
        begun = time.perf_counter()
        with self.record.paused(part), watch.phase(part, "save"):
            yield
        self.record.add({column: time.perf_counter() - begun})

    def _answered(self, generator, prompts: Sequence[Prompt], samples: int, counters: Sequence[tuple[int, int]],
                  timed: Callable) -> list[Group]:
        """A group for each prompt, with rewards. timed: as `_timed`."""
        text: dict[int, str] = {}
        own = lambda i: i % jax.process_count() == jax.process_index()

        def ended(i: int, answer: Completion) -> None:
            watch.progress()
            text[i] = self.words.text(answer.tokens)
            if own(i):
                prompt = prompts[i // samples]
                self.scorer.submit(i, prompt.text, text[i], prompt.line)
        limits = GenerationLimits(self.rl.max_tokens, self.words.stop_ids,
                                  ended=(lambda _, tokens: self.words.ended(tokens)) if self.words.stops else None)
        with timed("sampling", "sample_s"):
            found = generator.complete([prompt.ids.tolist() for prompt in prompts], limits,
                                       Picking(self.rl.temperature), self.run.run.seed, samples=[samples] * len(prompts),
                                       counters=counters, each=ended)
        with timed("rewards", "reward_s"):
            outcomes = {}
            for part in agree.exchange({i: dataclasses.astuple(one) for i, one in self.scorer.results().items()}):
                outcomes |= {int(i): rewards.Outcome(*one) for i, one in part.items()}
        wrong = [i for i, one in enumerate(found) if not np.isfinite(one.logprobs).all()]
        if wrong:
            raise RolloutError(f"the logits are not finite in {len(wrong)} of {len(found)} answers, the first to "
                               f"{prompts[wrong[0] // samples].place}: nothing of them is learned; go on from an earlier "
                               f"checkpoint by checkpoint.step, with a lower optimizer.learning_rate")
        self._check_failures(outcomes)
        groups = []
        for p, prompt in enumerate(prompts):
            these = range(p * samples, (p + 1) * samples)
            none = 0.0 if self.rl.reward_failures == "zero" else np.nan
            groups.append(Group(
                prompt, counters[p][1], [found[i] for i in these], [text[i] for i in these],
                np.array([none if outcomes[i].reward is None else outcomes[i].reward for i in these], np.float64),
                [outcomes[i].parts for i in these], [outcomes[i].failure for i in these],
                sum(outcomes[i].unsteady for i in these)))
        return groups

    def _check_failures(self, outcomes) -> None:
        failed = {i: one.failure for i, one in sorted(outcomes.items()) if one.failure}
        most = 0 if self.rl.reward_failures == "stop" else MOST_FAILURES * len(outcomes)
        if len(failed) > most:
            raise RolloutError(f"{len(failed)} of {len(outcomes)} answers have no reward, since rl.reward="
                               f"{self.rl.reward} failed: {'; '.join(list(dict.fromkeys(failed.values()))[:3])}")
        if unsteady := sum(one.unsteady for one in outcomes.values()):
            say.err(f"{unsteady} answers were scored twice and have two rewards: rl.reward={self.rl.reward} is not a "
                    f"function of the answer, and a run that goes on after a stop will differ")

    # ---- what is learned ---------------------------------------------------------------------------------------------

    def _packed(self, groups: Sequence[Group], first: int) -> list[dict]:
        """A batch for each update, from every so manieth group. first: step before which they are learned from."""
        rl, data = self.rl, self.run.data
        gain_GN = answers.advantages(np.stack([group.rewards for group in groups]), rl.advantage) if groups else []
        parts = []
        for update in range(rl.updates):
            found = [answers.DrawnAnswer(group.prompt.ids, np.asarray(one.tokens, np.int32),
                                         np.asarray(one.logprobs, np.float32), float(gain),
                                         learned=not np.isnan(reward) and (rl.truncated == "keep" or one.stopped == "stop"))
                     for group, gain_N in list(zip(groups, gain_GN, strict=True))[update::rl.updates]
                     for one, gain, reward in zip(group.answers, gain_N, group.rewards, strict=True)]
            batch, _ = answers.pack(found, rl, data.global_batch, data.seq_len, (first + update) * data.global_batch)
            parts.append(batch)
        return parts

    def _computed(self, batch: dict) -> int:
        """Tokens, padding among them, of the microbatches that are computed."""
        rows = self.run.data.global_batch // self.run.training.microbatches
        used = np.flatnonzero((batch["targets"] != NO_TARGET).any(1))
        return (int(used[-1]) // rows + 1) * rows * self.run.data.seq_len if len(used) else 0

    def _scored(self, params: dict, batch: dict) -> np.ndarray:
        """Log-probabilities of the targets, float32 [rows, T]."""
        if self._score is None:
            step = self.program.step
            self._score = self.program.compiled(self.program.scores, step.state.abstract.params, step.batch)
        rows = {name: x[self.program.rows] for name, x in batch.items()}
        found_BT = np.asarray(self._score(params, self.program.place(rows))).reshape(batch["tokens"].shape)
        order = self.program.step.order
        return found_BT if order is None else found_BT[:, np.argsort(order)]

    def validate(self, state: State) -> tuple[float, float, int]:
        """(mean reward of one answer to each held-out prompt, its standard error, number of answers with a reward)."""
        prompts = self.prompts.held[:self.run.validation.batches * self.rl.prompts]
        generator = self.sampler.generator(state.params)
        groups = self._answered(generator, prompts, 1, [(VALIDATION, row) for row in range(len(prompts))],
                                lambda *_: contextlib.nullcontext())        # within a validation's time
        found = np.concatenate([group.rewards for group in groups])
        found = found[~np.isnan(found)]
        error = float(found.std(ddof=1) / np.sqrt(len(found))) if len(found) > 1 else 0.0
        return float(found.mean()) if len(found) else 0.0, error, len(found)

    def _numbers(self, groups: Sequence[Group]) -> dict[str, float]:
        """Columns of the metrics row."""
        every = [one for group in groups for one in group.answers]
        if not every:
            return {}
        found = np.concatenate([group.rewards for group in groups])
        there = found[~np.isnan(found)]
        lengths = np.array([len(one.tokens) for one in every])
        parts = {name for group in groups for one in group.parts for name in one}
        mean = lambda values: float(np.mean(values)) if len(values) else 0.0
        failures = [failure for group in groups for failure in group.failures if failure]
        return {"reward": mean(there), "reward_std": float(np.std(there)) if len(there) else 0.0,
                **{f"reward/{name}": mean([one[name] for group in groups for one in group.parts if name in one])
                   for name in sorted(parts)},
                "answer_tokens": mean(lengths), "answer_tokens_max": float(lengths.max()),
                "truncated": mean([one.stopped == "length" for one in every]),
                "reward_failed": float(len(failures)),
                "reward_timeouts": float(sum("timeout" in failure for failure in failures)),
                "reward_unsteady": float(sum(group.unsteady for group in groups))}

    # ---- what is kept ------------------------------------------------------------------------------------------------

    def _key(self, number: int) -> str:
        """Hash of what batch `number` is a function of, but for the weights."""
        identity = [number, self.run.run.seed, self.rl.model_dump(exclude=set(FREE)), self.run.data.seq_len,
                    self.run.data.global_batch, self.run.model.model_dump(), self.run.lora.model_dump()]
        return hashlib.blake2b(json.dumps(identity).encode(), digest_size=10).hexdigest()

    def _checksum(self, params: dict) -> str:
        sums = jax.device_get(_checksums(params))
        return hashlib.blake2b(json.dumps([int(one) for one in sums]).encode(), digest_size=10).hexdigest()

    def _keep_text(self, number: int, groups: Sequence[Group]) -> None:
        lines = [{"prompt": group.prompt.text, "place": group.prompt.place, "answer": text, "tokens": len(one.tokens),
                  "stopped": one.stopped, "reward": None if np.isnan(reward) else float(reward), **parts,
                  **({"failure": failure} if failure else {})}
                 for group in groups for one, text, reward, parts, failure in zip(
                     group.answers, group.text, group.rewards, group.parts, group.failures, strict=True)]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        _quietly(lambda: files.replace(self.directory / f"{number}.jsonl", text.encode(errors="surrogatepass")))
        _quietly(lambda: _drop_before(self.directory, number - self.rl.keep + 1))


_checksums = jax.jit(lambda params: [replicas.checksum(leaf) for leaf in jax.tree.leaves(params)])


@dataclasses.dataclass(frozen=True)
class _Kept:
    """A batch of answers on disk, as arrays: whole or absent. key: of what it is a function of."""
    directory: Path
    number: int
    key: str

    @property
    def path(self) -> Path:
        return self.directory / f"{self.number}.npz"

    def write(self, groups: Sequence[Group], drawn: int, scores: dict[str, np.ndarray], weights: str) -> None:
        """Best effort: without it a run that is killed here draws the same answers again."""
        every = [one for group in groups for one in group.answers]
        told = {"key": self.key, "weights": weights, "drawn": drawn,
                "samples": [len(group.answers) for group in groups], "stopped": [one.stopped for one in every],
                "lengths": [len(one.tokens) for one in every], "rows": [group.row for group in groups],
                "parts": [one for group in groups for one in group.parts],
                "failures": [one for group in groups for one in group.failures],
                "unsteady": [group.unsteady for group in groups]}
        flat = lambda name, dtype: np.array([value for one in every for value in getattr(one, name)], dtype)
        content = io.BytesIO()
        np.savez(content, told=np.frombuffer(json.dumps(told).encode(), np.uint8), tokens=flat("tokens", np.int32),
                 logprobs=flat("logprobs", np.float32), margins=flat("margins", np.float32),
                 rewards=np.concatenate([group.rewards for group in groups]) if groups else np.zeros(0), **scores)

        def place() -> None:
            self.directory.mkdir(exist_ok=True)
            files.replace(self.path, content.getvalue())
        _quietly(place)

    def read(self, weights: str | None, first: int, prompts: Prompts,
             words: Words) -> tuple[list[Group], int, dict] | None:
        """(groups, prompts drawn by then, scores by name), the same in every process; None where there are none of this
        key and these weights (None: of any). first: prompts drawn before it."""
        found = self._read()
        usable = found is not None and found[0]["key"] == self.key and weights in (None, found[0]["weights"])
        if not all(agree.exchange(usable)):
            return None
        told, arrays = found
        cuts = np.cumsum(told["lengths"])[:-1]
        values = zip(*(np.split(arrays[name], cuts) for name in ("tokens", "logprobs", "margins")), told["stopped"],
                     arrays["rewards"], told["parts"], told["failures"], strict=True)
        groups = []
        for row, samples, unsteady in zip(told["rows"], told["samples"], told["unsteady"], strict=True):
            (prompt,) = prompts.draw(first + row, 1)
            group = Group(prompt, row, [], [], np.zeros(samples), [], [], unsteady)
            for i in range(samples):
                tokens, logprobs, margins, stopped, group.rewards[i], parts, failure = next(values)
                group.answers.append(Completion(prompt.ids.tolist(), tokens.tolist(), stopped, logprobs.tolist(),
                                                margins.tolist()))
                group.text.append(words.text(tokens.tolist()))
                group.parts.append(parts)
                group.failures.append(failure)
            groups.append(group)
        return groups, told["drawn"], {name: arrays[name] for name in SCORES if name in arrays}

    def _read(self) -> tuple[dict, dict] | None:
        try:
            with np.load(self.path, allow_pickle=False) as file:
                arrays = dict(file)
            return json.loads(arrays.pop("told").tobytes()), arrays
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None


def _drop_before(directory: Path, first: int) -> None:
    for path in directory.iterdir():
        if path.suffix in (".npz", ".jsonl") and path.stem.isdigit() and int(path.stem) < first:
            path.unlink(missing_ok=True)


def _quietly(write: Callable[[], None]) -> None:
    """Writes in process 0; what fails is told, and costs no run."""
    if jax.process_index():
        return
    try:
        write()
    except OSError as error:
        say.err(f"answers are not kept ({files.said(error)}); the run goes on without")
