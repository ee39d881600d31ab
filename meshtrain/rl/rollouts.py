"""The feed of training.objective = "rl": samples answers to prompts, scores them, and packs them into batches.

Batch n of answers is a function of the settings, n, and the weights after (n - rl.lag) · rl.updates steps: random keys
are counters, and nothing depends on time, order or layout. Every process samples or reads all answers, scores its
share, and packs the same rows. run.dir/rollouts has the newest batches as text and as arrays. A killed run resumes from
the arrays without sampling or scoring again.
"""
from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from meshtrain.assembly import Assembly
from meshtrain.cluster import agree, watch
from meshtrain.config import ConfigError, Run, user_errors
from meshtrain.inference.detokenizer import Words
from meshtrain.inference.generate import Completion, GenerationLimits
from meshtrain.inference.sampling import Picking
from meshtrain.journal.journal import Journal
from meshtrain.names import NO_TARGET
from meshtrain.rl import answers
from meshtrain.rl.groups import AnswerBatch, Completer, Group, Kept, KeptBatches, RolloutError, ScoredAnswer, means
from meshtrain.rl.prompts import Prompt, Prompts
from meshtrain.rl.rewards import workers
from meshtrain.rl.samplers import Pause, Sampler, SamplingWeights
from meshtrain.run import say
from meshtrain.run.hooks import RewardValidation
from meshtrain.run.loop import NoBatch, StepBatch, Stop
from meshtrain.training.state import State
from meshtrain.training.step import Program

VALIDATION = 2**32 - 1      # batch number in the random keys of validations: all of them use the same noise
MOST_FAILURES = 0.1         # the run ends if scoring fails for a larger share of a batch's answers
WAITS_S = 0.2               # seconds of waiting for scores between two checks for a stop request
ROUNDS = 3                  # with rl.filter, prompts are drawn for a batch up to this many times
SCORES = ("old", "reference")       # fields of a batch: log-probabilities from the trainer's forward pass


def check(run: Run, prompts: Prompts) -> None:
    """Check settings before weights are read. Raises: ConfigError if answers may not fit, or the reward is unusable."""
    rl, data = run.rl, run.data
    count = rl.prompts * rl.samples // rl.updates
    longest = prompts.longest_with_answer(rl.max_tokens)
    needed = answers.count_needed_rows(count, longest, data.seq_len)
    if needed > data.global_batch:
        raise ConfigError(
            f"data.global_batch={data.global_batch} sequences of data.seq_len={data.seq_len} may be too few for the "
            f"{count} answers of a step (rl.prompts × rl.samples / rl.updates), each up to {longest} tokens long with "
            f"its prompt; use data.global_batch={needed} or more (microbatches without answers are not computed)")
    with user_errors():
        workers.check(rl.reward, {prompt.place: prompt.line for prompt in (*prompts.prompts, *prompts.held)},
                      rl.reward_memory_gb)


@dataclasses.dataclass(frozen=True)
class Reference:
    """The reference of rl.kl. weights: function from a step's weights to the reference weights; None without rl.kl.
    origin: [digest of the reference weights, step of checkpoint.init_from]; [] for the base model of adapters."""
    weights: Callable[[dict], dict] | None
    origin: list

    def of(self, state: State) -> dict:
        assert self.weights is not None, "without rl.kl no batch has its scores"
        return self.weights(state.params)


class Rollouts:
    """Samples answers and makes the batches of steps (loop.Feed).

    words: detokenizer, with the tokens and strings that end an answer. rewards: closed with the feed. kept: the files
    of the run's batches. position: saved in the checkpoint that the run resumes from, see `position`.
    """

    evaluates = False

    def __init__(self, made: Assembly, prompts: Prompts, words: Words, sampler: Sampler,
                 rewards: workers.RewardWorkers, reference: Reference, kept: KeptBatches,
                 position: dict | None = None):
        self.run, self.rl, self.program, self.prompts, self.words = made.run, made.run.rl, made.program, prompts, words
        self.sampler, self.rewards, self.reference, self.kept = sampler, rewards, reference, kept
        self._marks = [(position["batches"], position["tokens"], position["drawn"]) if position else (0, 0, 0)]
        # (number of the batch, its parts (one per update), number of prompts drawn up to it)
        self._held: tuple[int, list[dict], int] | None = None
        self._score: Callable | None = None

    def validation(self, program: Program, stop: Stop) -> RewardValidation:
        return RewardValidation(self.run, self, stop)

    def close(self) -> None:
        self.rewards.close()

    def tokens(self, steps: int) -> int:
        return self._mark(steps)[1]

    def position(self, steps: int) -> dict:
        _, tokens, drawn = self._mark(steps)
        origin = {"origin": self.reference.origin} if self.reference.origin else {}
        return {"batches": steps, "packing": "answers", "tokens": tokens, "drawn": drawn,
                "prompts": self.prompts.digest, **self.sampler.position(steps), **origin}

    def _mark(self, steps: int) -> tuple[int, int, int]:
        """Return (steps, number of tokens in the batches of these steps, number of prompts drawn for the answer batches
        that are completed after these steps)."""
        return next(mark for mark in reversed(self._marks) if mark[0] <= steps)

    def next(self, done: int, state: State, journal: Journal, stop: Stop) -> StepBatch:
        number, part = divmod(done, self.rl.updates)
        if fresh := self._held is None or self._held[0] != number:
            self._held = None       # free the last batch before sampling
            self._held = number, *self._batch(number, part, state, Pause(journal, stop.must_stop))
        _, parts, drawn = self._held
        batch = parts[part]
        tokens = self._count_computed(batch)
        _, tokens_before, drawn_before = self._mark(done)
        self._marks = [*self._marks[-64:], (done + 1, tokens_before + tokens,
                                            drawn if part + 1 == self.rl.updates else drawn_before)]
        rows = {name: x[self.program.rows] for name, x in batch.items()}
        return StepBatch(self.program.place(rows), tokens, fresh)

    # ---- one batch of answers ----------------------------------------------------------------------------------------

    def _batch(self, number: int, part: int, state: State, pause: Pause) -> tuple[list[dict], int]:
        """Return (the parts of batch `number`, one per update; number of prompts drawn up to this batch). part: the
        next update. state: the state before this update."""
        pause.journal.settle()       # write the row of the step before: later numbers belong to the next row
        kept = self.kept.of(number)
        first = self._mark(number * self.rl.updates + part)[2]
        weights = self.sampler.request(number, part, first, state.params, pause)
        earlier = kept.read(weights.checksum, first, self.prompts, self.words)
        if earlier is None and part and jax.process_index() == 0:
            say.err(f"{kept.path} is missing or damaged. It had the answers that earlier steps trained on; "
                    f"they are sampled again, with the current weights")
        # Called twice: each call returns what the processes agreed on in the call before (agree.StopAgreement).
        if earlier is None and part == 0 and (pause.stopping() or pause.stopping()):
            raise NoBatch
        drawn = earlier or self._draw(kept, weights, first, state, pause)
        if number == 0 and part == 0 and _list_endings(drawn) == {"length"}:
            say.out(f"batch 0: no answer ended within rl.max_tokens={self.rl.max_tokens}. An answer ends with "
                    f"{self.words.ends}. Set data.eos to the end token that the model was trained with, or add its "
                    f"text to rl.stop, or raise rl.max_tokens")
        parts = self._pack(drawn.groups, number * self.rl.updates)
        if part == 0 and not any((batch["targets"] != NO_TARGET).any() for batch in parts):
            why = self._why_nothing(drawn, drawn.drawn - first)
            say.out(f"batch {number}: the run does not train on it, because {why}")
        if missing := [name for name in SCORES if name in self.program.step.batch and name not in drawn.scores]:
            with pause.time("sampling", "score_s"):
                for name in missing:
                    params = state.params if name == "old" else self.reference.of(state)
                    drawn.scores[name] = np.stack([self._compute_scores(params, batch) for batch in parts])
        for name, values in drawn.scores.items():
            for batch, values_BT in zip(parts, values, strict=True):
                batch[name] = values_BT
        if earlier is None:
            kept.write(drawn, weights.checksum or "", self.rl.keep)
        if part == 0:
            pause.journal.add(drawn.numbers())
        return parts, drawn.drawn

    def _draw(self, kept: Kept, weights: SamplingWeights, first: int, state: State, pause: Pause) -> AnswerBatch:
        """Sample and score the batch of `kept`, and return it.

        weights: they sample the batch. first: number of prompts drawn before. Raises: NoBatch if the run has to stop.
        """
        number = kept.number
        before: list[Completion] = []
        generator = self.sampler.open(kept, weights, state.params, pause)

        def waits(sampled: list[Completion]) -> None:
            if pause.stopping():
                if not self.sampler.saves:
                    kept.hold([*before, *sampled], weights.checksum or "")
                raise NoBatch
        groups: list[Group] = []
        wanted, equal, row = self.rl.prompts, 0, 0
        for _ in range(ROUNDS if self.rl.filter == "equal" else 1):
            prompts = self.prompts.draw(first + row, wanted - len(groups))
            counters = [(number, row + i) for i in range(len(prompts))]
            sampled = self._answer(generator, prompts, self.rl.samples, counters, pause.time, waits)
            before += [answer.drawn for group in sampled for answer in group.answers]
            row += len(prompts)
            equal += sum(group.equal for group in sampled)
            groups += sampled if self.rl.filter == "none" else [group for group in sampled if not group.equal]
            if len(groups) == wanted:
                break
        return AnswerBatch(groups, first + row, equal / row, weights.version)

    def _answer(self, generator: Completer, prompts: Sequence[Prompt], samples: int,
                  counters: Sequence[tuple[int, int]], timed: Callable, waits: Callable[[list[Completion]], None]
                  ) -> list[Group]:
        """Sample `samples` answers to each prompt, score them, and return a group for each prompt.

        counters: (batch, row) of each prompt, for the random keys. timed: see `Pause.time`. waits: called with the
        answers repeatedly while scores are missing; may raise NoBatch. Raises: RolloutError.
        """
        text: dict[int, str] = {}

        def submit(i: int, answer: Completion) -> None:
            watch.progress()
            text[i] = self.words.text(answer.tokens)
            if i % jax.process_count() == jax.process_index():
                prompt = prompts[i // samples]
                self.rewards.submit(i, prompt.text, text[i], prompt.line)
        limits = GenerationLimits(self.rl.max_tokens, self.words.stop_ids, ended=self.words.at_string)
        with timed("sampling", "sample_s"):
            completions = generator.complete(
                [prompt.ids.tolist() for prompt in prompts], limits, Picking(self.rl.temperature), self.run.run.seed,
                samples=[samples] * len(prompts), counters=counters, each=submit)
        with timed("rewards", "reward_s"):
            outcomes: dict[int, workers.Reward] = {}
            while not all(agree.exchange(self.rewards.wait_for_scores(WAITS_S))):
                waits(completions)
            results = {i: dataclasses.astuple(reward) for i, reward in self.rewards.results().items()}
            for part in agree.exchange(results):
                outcomes |= {int(i): workers.Reward(*fields) for i, fields in part.items()}
        for completion in completions:      # a stopped answer includes the token that ends it, which is trained on
            ended = limits.ended or completion.tokens[-1] in limits.stop_ids
            assert ended if completion.stopped == "stop" else len(completion.tokens) == limits.tokens, completion
        wrong = [i for i, completion in enumerate(completions) if not np.isfinite(completion.logprobs).all()]
        if wrong:
            raise agree.mark_agreed(RolloutError(
                f"the logits are not finite in {len(wrong)} of {len(completions)} answers, first in an answer to "
                f"{prompts[wrong[0] // samples].place}: the run did not train on this batch; continue "
                f"from an earlier checkpoint (checkpoint.step) with a lower optimizer.learning_rate"))
        self._check_failures(outcomes)
        groups = []
        for p, prompt in enumerate(prompts):
            these = range(p * samples, (p + 1) * samples)
            none = 0.0 if self.rl.reward_failures == "zero" else np.nan
            scored = [ScoredAnswer(completions[i], text[i],
                                   none if (reward := outcomes[i].reward) is None else float(reward),
                                   outcomes[i].parts, outcomes[i].failure) for i in these]
            groups.append(Group(prompt, counters[p][1], scored, sum(outcomes[i].unsteady for i in these)))
        return groups

    def _check_failures(self, outcomes: Mapping[int, workers.Reward]) -> None:
        failed = {i: outcome.failure for i, outcome in sorted(outcomes.items()) if outcome.failure}
        most = 0 if self.rl.reward_failures == "stop" else MOST_FAILURES * len(outcomes)
        if len(failed) > most:
            raise agree.mark_agreed(RolloutError(
                f"{len(failed)} of {len(outcomes)} answers have no reward, because rl.reward={self.rl.reward} failed: "
                f"{'; '.join(list(dict.fromkeys(failed.values()))[:3])}; fix the function, or the lines that it "
                f"cannot score, and start again"))
        unsteady = sum(outcome.unsteady for outcome in outcomes.values())
        if unsteady and jax.process_index() == 0:
            say.err(f"{unsteady} answers were scored twice with different rewards: rl.reward={self.rl.reward} is not "
                    f"a function of the answer, so a resumed run will differ")

    # ---- what is learned ---------------------------------------------------------------------------------------------

    def _pack(self, groups: Sequence[Group], first: int) -> list[dict]:
        """Return a batch for each update u, of groups u, u + rl.updates, … first: step of the first update, from 0."""
        rl, data = self.rl, self.run.data
        reward_GN = np.array([[answer.reward for answer in group.answers] for group in groups])
        gain_GN = answers.advantages(reward_GN, rl.advantage) if groups else []
        parts = []
        for update in range(rl.updates):
            drawn = [answers.DrawnAnswer(group.prompt.ids, np.asarray(answer.drawn.tokens, np.int32),
                                         np.asarray(answer.drawn.logprobs, np.float32), float(gain),
                                         learned=not np.isnan(answer.reward) and (
                                             rl.truncated == "keep" or answer.drawn.stopped == "stop"))
                     for group, gain_N in list(zip(groups, gain_GN, strict=True))[update::rl.updates]
                     for answer, gain in zip(group.answers, gain_N, strict=True)]
            batch, _ = answers.pack(drawn, rl, data.global_batch, data.seq_len, (first + update) * data.global_batch)
            parts.append(batch)
        return parts

    def _why_nothing(self, drawn: AnswerBatch, count: int) -> str:
        """Return why no answer of a batch can be trained on, as text. count: number of groups sampled for the batch."""
        cut = _list_endings(drawn) == {"length"}
        if cut and self.rl.truncated == "mask":
            return (f'no answer ended within rl.max_tokens={self.rl.max_tokens}, and rl.truncated="mask" leaves such '
                    f'answers out; raise rl.max_tokens, or set rl.truncated="keep"')
        if cut:
            return (f"no answer ended within rl.max_tokens={self.rl.max_tokens} and all rewards are equal; an answer "
                    f"ends with {self.words.ends}")
        return (f"all rewards are equal in each of its {count} groups of answers; give easier or harder prompts, or "
                f"another reward")

    def _count_computed(self, batch: dict) -> int:
        """Return the number of tokens, including padding, in the microbatches that are computed."""
        rows = self.run.data.global_batch // self.run.training.microbatches
        used = np.flatnonzero((batch["targets"] != NO_TARGET).any(1))
        return (int(used[-1]) // rows + 1) * rows * self.run.data.seq_len if len(used) else 0

    def _compute_scores(self, params: dict, batch: dict) -> np.ndarray:
        """Return the log-probabilities of a batch's targets, float32 [rows, T]."""
        if self._score is None:
            step = self.program.step
            self._score = self.program.compile_function(self.program.scores, step.state.abstract.params, step.batch)
        rows = {name: x[self.program.rows] for name, x in batch.items()}
        return np.asarray(self._score(params, self.program.place(rows))).reshape(batch["tokens"].shape)

    def validate(self, state: State, stopping: Callable[[], bool]) -> tuple[dict[str, float], int]:
        """Sample and score one answer to each held-out prompt. stopping: see `Pause`.

        Return (columns of the metrics row, number of answers with a reward). The columns are the mean reward, its
        standard error, and the means of the reward's further values. Raises: NoBatch if the run has to stop.
        """
        def waits(_) -> None:
            if stopping():
                raise NoBatch
        prompts = self.prompts.held[:self.run.validation.batches * self.rl.prompts]
        generator = self.sampler.generator(state.params)
        groups = self._answer(generator, prompts, 1, [(VALIDATION, row) for row in range(len(prompts))],
                                lambda *_: contextlib.nullcontext(), waits)     # its time counts as validation
        scored = [answer for group in groups for answer in group.answers]
        rewards = np.array([answer.reward for answer in scored if not np.isnan(answer.reward)])
        return {"val_reward": float(rewards.mean()) if len(rewards) else 0.0,
                "val_reward_error": float(rewards.std(ddof=1) / np.sqrt(len(rewards))) if len(rewards) > 1 else 0.0,
                **{f"val_reward/{name}": mean for name, mean in means(scored).items()}}, len(rewards)


def _list_endings(drawn: AnswerBatch) -> set[str]:
    """Return the ways in which answers of a batch ended: "stop", "length"."""
    return {answer.drawn.stopped for answer in drawn.answers}
