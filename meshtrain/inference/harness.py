"""Adapter to the LM Evaluation Harness: Scorer and Generator answer its three kinds of requests.

If the model has a `lead`, every context begins with it, and so does every rolling window, including windows that are
cut. An empty context becomes the prefix token. The harness's own Hugging Face models lose the lead where a context is
cut, and in all windows except the first, whose text begins with two leads. Sequences are padded on the right to a
multiple of STEP, so that few programs are compiled. This module imports lm_eval.

Source: github.com/EleutherAI/lm-evaluation-harness, lm_eval.api.model.TemplateLM.
"""
from __future__ import annotations

import dataclasses
import difflib
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import lm_eval
import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from meshtrain.inference.detokenizer import Words
from meshtrain.inference.generate import Generator, GenerationLimits
from meshtrain.inference.sampling import Picking
from meshtrain.inference.score import Scorer
from meshtrain.names import NO_TARGET

STEP = 64
NEW_TOKENS = 256        # tokens of an answer, if a task does not set them


class HarnessModel(TemplateLM):
    """A model for the harness.

    encode: text to ids without special tokens. words: decodes an answer and knows its stops. prefix: the token before a
    document. length: maximum tokens of a sequence. lead: the tokens with which every context begins.
    """

    def __init__(self, scorer: Scorer, generator: Generator, encode: Callable[[str], list[int]], words: Words,
                 prefix: int, length: int, lead: Sequence[int] = ()):
        super().__init__()
        self.scorer, self.generator, self.encode, self.words = scorer, generator, encode, words
        self.prefix, self.length, self.lead = prefix, length, list(lead)

    @property
    def eot_token_id(self) -> int:
        return self.words.stop_ids[0] if self.words.stop_ids else self.prefix

    @property
    def prefix_token_id(self) -> int:
        return self.prefix

    @property
    def max_length(self) -> int:
        return self.length

    @property
    def tokenizer_name(self) -> str:
        return "meshtrain"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        ids = list(self.encode(string))
        lead = [] if add_special_tokens is False or self._leads(ids) else self.lead
        return lead + ids

    def _leads(self, ids: Sequence[int]) -> bool:
        """Return whether ids begin with the lead. A text may itself begin with the lead."""
        return list(ids[:len(self.lead)]) == self.lead

    def _cut(self, ids: Sequence[int], most: int) -> list[int]:
        """Return the last `most` ids. If ids begin with the lead, so does the result."""
        lead = self.lead if len(ids) > most > len(self.lead) and self._leads(ids) else []
        return lead + list(ids[len(lead):])[-(most - len(lead)):]

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **kwargs) -> list[tuple[float, bool]]:
        """Return (log-likelihood of the continuation, whether it is the greedy one) for each request. A request is
        (texts, context ids, continuation ids)."""
        rows = [self._cut(context + continuation, self.length + 1) for _, context, continuation in requests]
        order, results = sorted(range(len(rows)), key=lambda i: -len(rows[i])), {}
        while order:
            T = -(-max(len(rows[order[0]]) - 1, 1) // STEP) * STEP
            taken, order = order[:self.scorer.rows(T)], order[self.scorer.rows(T):]
            logprobs, likeliest = self.scorer.score(self._batch([rows[i] for i in taken], T))
            for row, i in enumerate(taken):
                end = len(rows[i]) - 1
                continuation = slice(end - min(len(requests[i][2]), end), end)
                results[i] = float(logprobs[row, continuation].sum(dtype=np.float64)), bool(
                    likeliest[row, continuation].all())
        return [results[i] for i in range(len(rows))]

    def _batch(self, rows: Sequence[list[int]], T: int) -> dict[str, np.ndarray]:
        B = self.scorer.rows(T)
        batch = {name: np.zeros((B, T), np.int32) for name in ("tokens", "targets", "segments")}
        batch["targets"][:] = NO_TARGET
        for i, row in enumerate(rows):
            end = len(row) - 1
            batch["tokens"][i, :end], batch["targets"][i, :end], batch["segments"][i, :end] = row[:-1], row[1:], 1
        index = np.tile(np.arange(T, dtype=np.int32), (B, 1))
        return batch | {"index": index, "positions": index, "sequence": np.zeros(B, np.int32)}

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        windows, owners = [], []
        for owner, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            ids = ids[len(self.lead):] if self._leads(ids) else ids
            lead = self.lead if len(self.lead) < self.length else []
            for window in get_rolling_token_windows(ids, prefix_token=(lead or [self.prefix])[-1],
                                                    max_seq_len=self.length - len(lead), context_len=1):
                context, continuation = make_disjoint_window(window)
                windows.append((None, lead if context == lead[-1:] else lead + context, continuation))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += logprob
        return totals

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """Return the text of each answer. Requests with equal options are answered together."""
        texts: dict[int, str] = {}
        alike: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            alike.setdefault(repr(sorted(request.args[1].items())), []).append(i)
        for numbers in alike.values():
            texts |= zip(numbers, self._generate([requests[i].args[0] for i in numbers], requests[numbers[0]].args[1]),
                         strict=True)
        return [texts[i] for i in range(len(requests))]

    def _generate(self, contexts: Sequence[str], options: dict) -> list[str]:
        until = options.get("until") or ()
        new = int(options.get("max_gen_toks") or options.get("max_new_tokens") or NEW_TOKENS)
        new = min(new, max(self.length - 1, 1))
        drawn = options.get("do_sample", False)
        how = Picking(float(options.get("temperature") or 1.0), int(options.get("top_k") or 0),
                      float(options.get("top_p") or 1.0), float(options.get("min_p") or 0.0)) if drawn else Picking()
        until = (until,) if isinstance(until, str) else tuple(until)
        words = dataclasses.replace(self.words, stops=(*until, *self.words.stops))
        # Cut on the left, as the harness does.
        prompts = [self._cut(self.tok_encode(context) or [self.prefix], max(self.length - new, 1))
                   for context in contexts]
        # A prompt that occurs several times is read once, and each occurrence samples another answer.
        numbers: dict[tuple[int, ...], list[int]] = {}
        for number, prompt in enumerate(prompts):
            numbers.setdefault(tuple(prompt), []).append(number)
        limits = GenerationLimits(new, words.stop_ids, ended=words.at_string)
        answers = self.generator.complete(list(numbers), limits, how, samples=list(map(len, numbers.values())))
        texts = dict(zip(itertools.chain(*numbers.values()), (words.text(answer.tokens) for answer in answers),
                         strict=True))
        return [texts[number] for number in range(len(prompts))]


def results(model: HarnessModel, tasks: Sequence[str], num_fewshot: int | None, limit: int | None) -> dict[str, dict]:
    """Return {task: {metric: value}}. tasks: names, or paths of YAML files. Raises: ValueError for a task that does not
    exist."""
    files = [Path(task) for task in tasks if task.endswith((".yaml", ".yml"))]
    names = [_name_in(Path(task)) if Path(task) in files else task for task in tasks]
    manager = TaskManager(include_path=sorted({path.resolve().parent for path in files}) or None,
                          include_defaults=len(files) < len(tasks))
    if missing := [name for name in names if name not in manager.all_tasks]:
        near = difflib.get_close_matches(missing[0], manager.all_tasks, n=1)
        guess = f"did you mean {near[0]}?" if near else "name a task, or the path of its .yaml file"
        raise ValueError(f"--tasks: {missing[0]} is not a task of the harness; {guess}")
    told = lm_eval.simple_evaluate(model, tasks=names, num_fewshot=num_fewshot, limit=limit,
                                   task_manager=manager, log_samples=False, bootstrap_iters=0)
    return {task: {name.removesuffix(",none"): value for name, value in metrics.items() if type(value) in (int, float)}
            for task, metrics in told["results"].items()}


def _name_in(path: Path) -> str:
    """Return the task name in a YAML file. Raises: ValueError if the file cannot be read or names no task."""
    try:
        match = re.search(r"^task:\s*[\"']?([^\s\"']+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--tasks: {path} cannot be read: {error}; name the .yaml file of a task") from None
    if not match:
        raise ValueError(f"--tasks: {path} has no line task: NAME; name the .yaml file of a task")
    return match[1]
