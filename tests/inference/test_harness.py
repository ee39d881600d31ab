"""The evaluation harness over a model of ours: local tasks, whose numbers are those of plain forward passes, one
request at a time."""
import json
import math

import jax
import numpy as np
import pytest
from commands import call, home, in_a_directory_of_its_own, refused, tiny  # noqa: F401

from meshtrain import trained
from meshtrain.commands import evaluate, train
from meshtrain.inference.detokenizer import Words

pytest.importorskip("lm_eval", reason="install the extra eval")
pytestmark = pytest.mark.long     # the harness lists its 10,000 tasks

CHOICE = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
target_delimiter: ""
output_type: {kind}
doc_to_text: "{{{{question}}}}"
{more}
"""
ROWS = [{"question": f"line {i}: {i * i} is the square", "choices": [" of", " by it", f" of {i}"], "answer": i % 3}
        for i in range(6)]


@pytest.fixture(scope="module")
def run_dir(home, tiny):
    ran = call(train.main, *tiny, "--training.steps=4", "--run.sample_tokens=0", "--model.compute_dtype=float32",
               "--run.dir", home / "asked")
    assert (ran.code, ran.err) == (0, ""), ran
    return home / "asked"


def task(directory, name: str, kind: str, more: str):
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    path = directory / f"{name}.yaml"
    path.write_text(CHOICE.format(name=name, kind=kind, data=directory / "rows.jsonl", more=more))
    return path


class Plain:
    """Forward passes over one request at a time, padded behind its end to 48 tokens: one program."""

    def __init__(self, run_dir):
        self.placed = placed = trained.describe(str(run_dir), 0, ["--mesh.tensor=1"], "evaluate").place()

        def forward(batch):
            x_BTD = placed.model.through_layers(placed.ex, placed.params, batch)
            return jax.nn.log_softmax(placed.model.head_logits(placed.ex, placed.params, x_BTD)[0])
        self.forward = jax.jit(forward)

    def logprobs(self, tokens: list[int]) -> np.ndarray:
        """float64 [T, V] of what follows each."""
        index = np.arange(48)[None]
        batch = {"tokens": np.zeros_like(index), "positions": index, "index": index,
                 "segments": (index < len(tokens)).astype(int),
                 "sequence": np.zeros(1, int)}
        batch["tokens"][0, :len(tokens)] = tokens
        with jax.set_mesh(self.placed.mesh):
            return np.asarray(self.forward(batch), np.float64)[:len(tokens)]

    def of(self, context: list[int], continuation: list[int]) -> float:
        tokens = context + continuation
        return float(self.logprobs(tokens[:-1])[np.arange(len(context) - 1, len(tokens) - 1), continuation].sum())

    def answer(self, tokens: list[int], most: int) -> bytes:
        found = b""
        while len(found) < most and not found.endswith(b"\n"):
            token = int(self.logprobs(tokens + list(found))[-1].argmax())
            if token == 256:
                break
            found += bytes([token])
        return found


def test_local_tasks_have_the_numbers_of_plain_forward_passes(run_dir, tmp_path):
    choice = task(tmp_path, "squares", "multiple_choice",
                  'doc_to_choice: "{{choices}}"\ndoc_to_target: answer\nmetric_list:\n'
                  "  - metric: acc\n  - metric: acc_norm")
    rolling = task(tmp_path, "text", "loglikelihood_rolling",
                   'doc_to_target: "{{question}}"\nmetric_list:\n  - metric: byte_perplexity')
    plain = Plain(run_dir)
    ran = call(evaluate.main, run_dir, "--tasks", f"{choice},{rolling}", "--mesh.data=2",
               "--mesh.tensor=2", "--json", "--limit=5")
    assert ran.code == 0, ran
    found = json.loads(ran.out)
    assert found["tokens"] > 0 and set(found["tasks"]) == {"squares", "text"}
    right = norm = 0
    for row in ROWS[:5]:
        scores = [plain.of([256, *row["question"].encode()], list(one.encode())) for one in row["choices"]]
        right += np.argmax(scores) == row["answer"]
        norm += np.argmax([score / len(one) for score, one in zip(scores, row["choices"])]) == row["answer"]
    assert (found["tasks"]["squares"]["acc"], found["tasks"]["squares"]["acc_norm"]) == (right / 5, norm / 5)
    # The run's sequences have 32 tokens: longer texts are read in windows, each of which begins with the separator.
    texts = [list(row["question"].encode()) for row in ROWS[:5]]
    nats = sum(plain.of([256], text) for text in texts)
    assert all(len(text) <= 32 for text in texts)
    assert found["tasks"]["text"]["byte_perplexity"] == pytest.approx(math.exp(-nats / sum(map(len, texts))), rel=1e-5)


def test_answers_to_a_task_are_the_likeliest_tokens_up_to_its_stop_string(run_dir, tmp_path):
    from lm_eval.api.instance import Instance

    from meshtrain.inference import harness
    plain = Plain(run_dir)
    found = trained.describe(str(run_dir), 0, ["--mesh.tensor=1"], "evaluate")
    text = found.text()
    placed = plain.placed
    with jax.set_mesh(placed.mesh):
        model = harness.HarnessModel(placed.scorer(), placed.generator(), text.encode,
                                     Words(text.decode, stop_ids=found.ends.ids), 256, 32)
        requests = [Instance("generate_until", {}, (question, {"until": ["\n"], "max_gen_toks": 9}), 0)
                    for question in ("line 3: 9 is", "", "a")]
        answers = model.generate_until(requests)
    for request, answer in zip(requests, answers, strict=True):
        wanted = plain.answer(list(request.args[0].encode()) or [256], 9)
        assert answer == wanted.split(b"\n")[0].decode(errors="replace")


@pytest.mark.parametrize("lead", [[], [9], [8, 9]], ids=str)
def test_contexts_and_all_windows_begin_with_the_lead_and_keep_it_where_they_are_cut(lead):
    from lm_eval.api.instance import Instance

    from meshtrain.inference import harness
    asked = []

    class Seen(harness.HarnessModel):
        def _loglikelihood_tokens(self, requests, disable_tqdm=False, **kwargs):
            asked.extend((context, continuation) for _, context, continuation in requests)
            return [(float(len(continuation)), True) for _, _, continuation in requests]
    encode = lambda text: [9 if one == "^" else ord(one) for one in text]       # a text may have the separator
    model = Seen(None, None, encode, Words(None), 9, 6, lead)
    request = lambda *args: Instance("", {}, args, 0)
    model.loglikelihood([request("ab", "cd"), request("", "cd"), request("a ", "b"), *[request("^a", "b")] * (lead == [9])])
    assert asked[:3] == [([*lead, 97, 98], [99, 100]), ([9], [99, 100]), ([*lead, 97], [32, 98])]
    assert asked[3:] == [([9, 97], [98])] * (lead == [9]), "one is enough"
    asked.clear()
    text = "abcdefghijklmnopq"
    for given in (text, "^" + text if lead == [9] else text):
        assert model.loglikelihood_rolling([request(given)]) == [len(text)]
        assert [one for _, continuation in asked for one in continuation] == encode(text), "each once"
        assert all(context[:len(lead)] == lead and len(context + continuation) <= 7 for context, continuation in asked)
        assert asked[0][0] == (lead or [9]) and len(asked) > 2
        asked.clear()
    assert model._cut([*lead, 1, 2, 3, 4, 5], 4) == [*lead, *range(2 + len(lead), 6)] and model._cut([1, 2], 4) == [1, 2]


def test_tasks_that_are_not_there_are_told(run_dir, tmp_path):
    refused(call(evaluate.main, run_dir, "--tasks", "none.yaml"), "--tasks: none.yaml cannot be read")
    (tmp_path / "empty.yaml").write_text("dataset_path: json\n")
    refused(call(evaluate.main, run_dir, "--tasks", tmp_path / "empty.yaml"), "has no line task: NAME")
    refused(call(evaluate.main, run_dir, "--tasks", "helaswag"), "helaswag is not a task", "did you mean hellaswag?")
