"""What a model goes on with: the tokens that transformers' generate gives, from any folder or run, on any mesh, in any
batch."""
import functools
import io
import json
import os
import math
import shutil
import signal

import conversations
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sampling
from commands import call, home, in_a_directory_of_its_own, process, refused, tiny  # noqa: F401
from folders import GOLDENS, NAMES, ROOT

from meshtrain import assembly, config, devices, trained
from meshtrain.commands import generate, train
from meshtrain.cost.program import audit, compile
from meshtrain.inference import generate as inference
from meshtrain.inference import detokenizer
from meshtrain.inference.generate import STRIDE, GenerationLimits
from meshtrain.inference.sampling import Picking, restrict, pick
from meshtrain.inference.score import Scorer
from meshtrain.names import NO_TARGET

ONE, EIGHT = {"tensor": 1}, {"data": 2, "fsdp": 2, "tensor": 2}
FAST = ("gpt2", "gemma3")
NEW = 24


@functools.lru_cache(maxsize=2)       # the programs of all of them are more memory maps than a process may have
def generator(name: str, **sizes):
    """(mesh, generator) of a golden, in float32."""
    words = [f"--mesh.{axis}={size}" for axis, size in sizes.items()]
    placed = trained.describe(str(GOLDENS / name), 0, words, "generate").place()
    assert placed.mesh.size == math.prod(sizes.values())
    with jax.set_mesh(placed.mesh):
        return placed.mesh, placed.generator()


def complete(name: str, sizes: dict, *args, **options):
    mesh, made = generator(name, **sizes)
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        return made.complete(*args, **options)


def golden(name: str) -> tuple[list[list[int]], list[list[int]]]:
    """(prompts of 3, 6 and 9 tokens, what follows)."""
    found = np.load(GOLDENS / name / "golden.npz")
    return [[token for token in row if token >= 0] for row in found["prompts"].tolist()], found["greedy"].tolist()


ASKED = [name for name in NAMES if "greedy" in np.load(GOLDENS / name / "golden.npz")]
CELLS = [pytest.param(name, EIGHT, marks=() if name == "llama3.1" else sampling.GRID, id=f"{name}, eight devices")
         for name in ASKED] + [
    pytest.param(name, ONE, marks=() if name in FAST else sampling.GRID, id=f"{name}, one device") for name in ASKED]


@pytest.mark.parametrize(("name", "sizes"), CELLS)
def test_greedy_tokens_equal_those_of_transformers_alone_and_in_a_padded_batch(name, sizes):
    prompts, wanted = golden(name)
    assert len({len(prompt) for prompt in prompts}) == 3
    together = complete(name, sizes, prompts, GenerationLimits(len(wanted[0])))
    assert [one.tokens for one in together] == wanted and {one.stopped for one in together} == {"length"}
    assert [one.prompt for one in together] == prompts
    assert complete(name, sizes, prompts[1:2], GenerationLimits(len(wanted[0]))) == together[1:2]


def test_the_length_of_a_sequence_chooses_the_factors_of_longrope_and_one_that_crosses_it_is_read_anew():
    """24 positions originally. Each token is the likeliest of a pass over all before it, as of transformers' generate,
    whose passes over 24 and fewer have the short factors."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 90, n).tolist() for n in (4, 18, 23, 24, 25, 40)]
    together = complete("phi3_longrope", ONE, prompts, GenerationLimits(8))
    mesh, made = generator("phi3_longrope", **ONE)
    scorer = Scorer(made.model, made.ex, made.params, mesh)
    wholes = [(one.prompt + one.tokens, end) for one in together for end in range(len(one.prompt), len(one.prompt) + 8)]
    index = np.tile(np.arange(48, dtype=np.int32), (scorer.rows(48), 1))
    batch = {name: np.zeros_like(index) for name in ("tokens", "segments")} | {
        "index": index, "positions": index, "targets": np.full_like(index, NO_TARGET),
        "sequence": np.zeros(len(index), np.int32)}
    for row, (whole, end) in enumerate(wholes):
        batch["tokens"][row, :end], batch["segments"][row, :end] = whole[:end], 1
        batch["targets"][row, end - 1] = whole[end]
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        _, likeliest = scorer.score(batch)
    assert all(likeliest[row, end - 1] for row, (_, end) in enumerate(wholes)), [
        (len(whole), end) for row, (whole, end) in enumerate(wholes) if not likeliest[row, end - 1]]
    # An answer depends on no neighbour and is the same drawn, one at a time.
    drawn = complete("phi3_longrope", ONE, prompts, GenerationLimits(8), Picking(1.0), seed=5, samples=[2] * 6)
    alone = complete("phi3_longrope", ONE, prompts[1:2], GenerationLimits(8), Picking(1.0), seed=5, samples=[2])
    assert drawn[2:4] == alone and drawn[2].tokens != drawn[3].tokens
    stopped = complete("phi3_longrope", ONE, prompts[1:2], GenerationLimits(8, (together[1].tokens[6],)))[0]
    first = together[1].tokens.index(together[1].tokens[6])
    assert (stopped.tokens, stopped.stopped) == (together[1].tokens[:first + 1], "stop")


def test_more_tensor_ranks_than_kv_heads_give_the_same_tokens():
    prompts, wanted = golden("llama3.2")
    assert [one.tokens for one in complete("llama3.2", {"tensor": 4, "data": 2}, prompts,
                                           GenerationLimits(len(wanted[0])))] == wanted


class Enough(Exception):
    """Of programs that cannot run here."""


@pytest.mark.skipif(compile.missing_wheels(), reason=f"install the extra gpu-compile: no {compile.missing_wheels()}")
def test_on_gpus_no_table_moves_for_a_token():
    """One prompt, and an embedding that is split over tensor: XLA would gather it to take one row of it."""
    run = config.Run(mesh=dict(tensor=2), sharding=dict(rules=str(ROOT.parent / "sharding_rules/tensor.toml")),
                     data=dict(global_batch=2),
                     model=dict(vocab_size=4096, embed_dim=128, num_layers=2, num_heads=2,
                                head_dim=64, mlp_dim=256, tie_embeddings=True))
    made, programs = assembly.assemble(run, compile.topology("h100:2")), []
    placed = trained.wrap(made, made.program.step.state.abstract.params)

    def compiled(name, jitted, *args):
        executable = placed.compile(name, jitted, *args)
        programs.append(audit.read(executable.as_text(), made.mesh))
        if name == "the generation of tokens":
            raise Enough
        given = jax.eval_shape(jitted, *args)
        return lambda *_: jax.tree.map(lambda a, place: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), given,
                                       executable.output_shardings)
    with jax.set_mesh(made.mesh), pytest.raises(Enough):
        inference.Generator(placed.model, placed.ex, placed.params, compiled).complete([[5, 6]], GenerationLimits(3))
    # two rows of float32 logits; the table: 1 MB
    assert max(one.payload_bytes for one in programs[-1].collectives) < 4096 * 4 * 2 + 1


def test_what_is_drawn_depends_on_seed_and_prompt_alone():
    """Not on the rows beside it, their lengths, the mesh, or how often the host looks."""
    prompts, _ = golden("qwen3")
    how, limits = Picking(1.0, top_k=50, top_p=0.95), GenerationLimits(NEW)
    wanted = complete("qwen3", ONE, prompts, limits, how, 7)
    assert complete("qwen3", EIGHT, prompts[::-1], limits, how, 7) == wanted[::-1]
    assert complete("qwen3", ONE, prompts[2:], limits, how, 7, tell=lambda *_: None) == wanted[2:]
    assert complete("qwen3", ONE, prompts, limits, how, 8) != wanted


def test_rows_stop_one_by_one_at_a_stop_id_at_their_length_and_at_what_the_host_finds():
    prompts, greedy = golden("qwen3")
    stop = greedy[1][5]
    first = greedy[1].index(stop) + 1
    limits = GenerationLimits(NEW, (stop,), length=9 + 4, ended=lambda row, tokens: 2 if row == 0
                              and len(tokens) > 2 else None)
    told = {}
    found = complete("qwen3", ONE, prompts, limits, tell=lambda row, tokens: told.update({row: tokens}))
    assert [(one.tokens, one.stopped) for one in found] == [
        (greedy[0][:2], "stop"), (greedy[1][:min(first, 8)], "stop" if first <= 8 else "length"),
        (greedy[2][:5], "length")]
    assert told == {row: one.tokens for row, one in enumerate(found)}
    assert STRIDE < NEW, "the host looks more than once"


def plain_allowed(z, temperature, top_k, top_p, min_p) -> np.ndarray:
    """The processors of transformers, one after another, for one row in float64."""
    z = np.asarray(z, np.float64) / temperature
    softmax = lambda z: np.exp(z - z.max()) / np.exp(z - z.max()).sum()
    if top_k:
        z = np.where(z < np.sort(z)[-min(top_k, len(z))], -np.inf, z)
    if top_p < 1:
        rising = np.argsort(z, kind="stable")
        out = np.cumsum(softmax(z)[rising]) <= 1 - top_p
        out[-1] = False
        z[rising[out]] = -np.inf
    if min_p:
        p = softmax(z)
        z = np.where(p < min_p * p.max(), -np.inf, z)
    return z


@pytest.mark.parametrize("how", [(0.7, 0, 1.0, 0.0), (1.0, 3, 1.0, 0.0), (1.3, 0, 0.8, 0.0),
                                 (1.0, 0, 1.0, 0.2), (0.9, 7, 0.6, 0.1),
                                 (1.0, 1, 1.0, 0.0), (1.0, 0, 1e-9, 0.0), (1.0, 0, 1.0, 1.0), (1.0, 500, 0.999, 0.0)])
def test_what_is_left_to_draw_from_is_what_transformers_leaves(how):
    z = 3 * np.random.default_rng(3).normal(size=(20, 60)).astype(np.float32)
    left = jax.jit(functools.partial(restrict, Picking(*how)))(z)
    np.testing.assert_allclose(left, [plain_allowed(row, *how) for row in z], rtol=1e-5)


def test_draws_have_the_probabilities_of_the_logits():
    z = jnp.log(jnp.asarray([0.5, 0.3, 0.15, 0.05]))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), jnp.arange(4000))
    drawn = jax.jit(functools.partial(pick, Picking(1.0, top_k=3)))(jnp.tile(z, (4000, 1)), keys).token_B
    # Four standard deviations of 4,000 draws.
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / 4000, np.asarray([0.5, 0.3, 0.15, 0]) / 0.95,
                               atol=4 * 0.5 / 4000 ** 0.5)


# ---- text ------------------------------------------------------------------------------------------------------------


def bytes_of(text: str) -> list[int]:
    return list(text.encode())


def test_an_answer_ends_before_its_first_stop_string_and_its_stop_id_is_no_text():
    made = detokenizer.Words(lambda ids: bytes(i for i in ids if i < 256).decode(errors="replace"),
                             ("END", "\n\n"), (256,))
    assert made.text([*bytes_of("so it is"), 256]) == "so it is" and made.find_end([*bytes_of("so it is"), 256]) is None
    assert made.text(bytes_of("one\n\ntwo END")) == "one" and made.find_end(bytes_of("one\n\ntwo END")) == 5
    stream, told = detokenizer.TextStream(made), []
    answer = bytes_of("gré E EN Ende ENDlich")
    for count in range(1, len(answer) + 1):
        told.append(stream.more(answer[:count]))
    assert "".join(told) + stream.rest(answer) == "gré E EN Ende "
    assert all("\ufffd" not in one and not one.endswith("E")
               for one in told), "what may yet be a stop string, or a letter, waits"


# ---- the command -----------------------------------------------------------------------------------------------------


def ids(*prompts) -> str:
    return json.dumps(prompts)


def test_a_folder_is_asked_with_ids_and_only_json_is_said():
    prompts, greedy = golden("gpt2")
    ran = call(generate.main, GOLDENS / "gpt2", "--prompt-ids", json.dumps(prompts),
               f"--max-tokens={NEW}", "--json", "--mesh.tensor=1")
    assert (ran.code, ran.err) == (0, ""), ran
    found = json.loads(ran.out)["completions"]
    ends = [tokens.index(2) + 1 if 2 in tokens else NEW for tokens in greedy]     # config.json: eos_token_id
    assert min(ends) < NEW
    assert found == [{"prompt_ids": prompt, "token_ids": tokens[:end], "text": None,
                      "stopped": "stop" if tokens[end - 1] == 2 else "length"}
                     for prompt, tokens, end in zip(prompts, greedy, ends)]


def test_several_answers_to_each_prompt_follow_one_another():
    asked = (GOLDENS / "qwen3", "--prompt-ids", ids([5, 6, 7], [8]), "--max-tokens=6", "--temperature=1", "--json",
             "--mesh.tensor=1")
    found = json.loads(call(generate.main, *asked, "--samples=3").out)["completions"]
    assert [one["prompt_ids"] for one in found] == [[5, 6, 7]] * 3 + [[8]] * 3
    assert len({tuple(one["token_ids"]) for one in found}) == 6
    assert json.loads(call(generate.main, *asked).out)["completions"] == found[::3]
    asked = asked[:3] + ("--max-tokens=2", "--top-k=5", "--samples=2", "--mesh.tensor=1")
    assert len(call(generate.main, *asked).out.splitlines()) == 4


@pytest.fixture(scope="module")
def run_dir(home, tiny):
    """A run of two stages of three layers."""
    words = (*tiny, "--mesh.data=1", "--mesh.fsdp=2", "--mesh.tensor=2", "--mesh.stage=2",
             "--model.num_layers=3", "--training.microbatches=2",
             f"--sharding.rules={ROOT.parent / 'sharding_rules/zero1.toml'}", "--pipeline.schedule=1f1b",
             "--training.steps=4", "--validation.every=0", "--run.dir", home / "staged",
             "--model.compute_dtype=float32")
    ran = call(train.main, *words)
    assert (ran.code, ran.err) == (0, ""), ran
    assert ran.out.split("a sample (")[1].partition("\n")[2].strip(), "pipelines tell one, too"
    return home / "staged"


def test_a_run_of_uneven_stages_is_asked_with_text_and_answers_alike_on_other_meshes(run_dir, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "line 1:\\n"}\n\n{"prompt": "square é"}\n')
    asked = (run_dir, "--prompts", tmp_path / "prompts.jsonl", "--max-tokens=20", "--temperature=1", "--json")
    ran = call(generate.main, *asked, "--mesh.tensor=1")
    assert (ran.code, ran.err) == (0, ""), ran
    found = json.loads(ran.out)["completions"]
    assert found[1]["prompt_ids"] == [256, *"square é".encode()]
    for one in found:
        assert 1 <= len(one["token_ids"]) <= 20 and (one["stopped"] == "stop") == (one["token_ids"][-1] == 256)
        assert one["text"] == bytes(token for token in one["token_ids"] if token < 256).decode(errors="replace")
    assert call(generate.main, *asked, "--mesh.data=2", "--mesh.fsdp=2", "--mesh.tensor=2").out == ran.out
    # One prompt streams, and what is told is the same text.
    told = call(generate.main, run_dir, "--prompt", "line 1:\n", "--max-tokens=20", "--temperature=1",
                "--mesh.tensor=1", "--step=4").out
    assert told == found[0]["text"] + "\n"
    stop = found[0]["text"][3:5]
    told = call(generate.main, run_dir, "--prompt=line 1:\n", "--max-tokens=20", "--temperature=1",
                "--mesh.tensor=1", "--stop", stop).out
    assert told == found[0]["text"].split(stop)[0] + "\n"


def test_answers_that_no_memory_holds_are_refused_before_it_is_taken(run_dir, monkeypatch):
    monkeypatch.setattr(devices, "memory_bytes", lambda found: 2**30 * len(found))
    ran = call(generate.main, run_dir, "--prompt=a", "--max-tokens=10000000", "--mesh.tensor=1")
    refused(ran, "--max-tokens 10000000", "and the devices have 1.0 GiB; use a smaller --max-tokens")


def test_the_command_starts_the_devices_that_it_is_told_of(run_dir):
    """A process of its own, as a user has it: here eight devices are up already."""
    prompt, options = "line 1:", ("--max-tokens=5", "--json", "--mesh.tensor=1")
    ran = process("-m", "meshtrain.generate", run_dir, "--prompt", prompt, *options,
                  "--mesh.data=2", "--mesh.simulated_devices=2")
    out, err = ran.communicate(timeout=300)
    assert (ran.returncode, err) == (0, ""), err
    assert out == call(generate.main, run_dir, "--prompt", prompt, *options).out


def test_a_signal_ends_a_command_in_one_line(run_dir, tmp_path):
    os.mkfifo(tmp_path / "prompts")
    ran = process("-m", "meshtrain.generate", run_dir, "--prompts", tmp_path / "prompts")
    with open(tmp_path / "prompts", "w"):      # waits until the command reads it
        ran.send_signal(signal.SIGINT)
        out, err = ran.communicate(timeout=60)
    assert (ran.returncode, out, err) == (75, "SIGINT: stopped\n", "")


def test_without_a_word_of_the_mesh_all_devices_that_divide_the_model_share_it():
    found = trained.describe(str(GOLDENS / "llama2"), 0, [], "generate")
    assert found.place().mesh.shape == {"data": 1, "fsdp": 1, "tensor": 4, "stage": 1, "context": 1}, "of eight"


# ---- conversations ---------------------------------------------------------------------------------------------------

TURNS = ("{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}{% if add_generation_prompt "
         "%}[assistant]{% endif %}")


def test_a_run_is_talked_to_by_a_template_and_remembers_what_was_said(run_dir, tmp_path, monkeypatch):
    (tmp_path / "turns.jinja").write_text(TURNS)
    (tmp_path
     / "asked.jsonl").write_text('{"messages": [{"role": "system", "content": "be"}, {"role": "user", "content": '
                                 '"6"}]}\n')
    asked = (run_dir, "--chat", f"--data.chat_template={tmp_path / 'turns.jinja'}", "--max-tokens=12",
             "--temperature=1", "--mesh.tensor=1")
    ran = call(generate.main, *asked, "--prompt", "one", "--json")
    assert (ran.code, ran.err) == (0, ""), ran
    once = json.loads(ran.out)["completions"][0]
    assert bytes(once["prompt_ids"]).decode() == "[user]one\n[assistant]"
    assert "\n" not in once["text"], "what the template writes behind an answer ends it"
    once = json.loads(call(generate.main, *asked, "--prompts", tmp_path / "asked.jsonl", "--json").out)["completions"][
        0]
    assert bytes(once["prompt_ids"]).decode() == "[system]be\n[user]6\n[assistant]"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\n\n\xff?\ntwo"), encoding="ascii"))
    ran = call(generate.main, *asked)
    assert ran.code == 0 and ran.err.startswith("error: that line is not UTF-8") and ran.err.count("\n") == 1, ran
    first = json.loads(call(generate.main, *asked, "--prompt", "one", "--json").out)["completions"][0]["text"]
    history = [{"role": "user", "content": "one"}, {"role": "assistant", "content": first},
               {"role": "user", "content": "two"}]
    (tmp_path / "asked.jsonl").write_text(json.dumps({"messages": history}))
    second = json.loads(call(generate.main, *asked, "--prompts", tmp_path / "asked.jsonl",
                             "--json").out)["completions"][0]["text"]
    assert ran.out == f"{first}\n{second}\n"


def test_the_template_of_a_folder_makes_its_prompts_and_its_end_of_turn_ends_an_answer(tmp_path):
    home = conversations.folder(tmp_path, "chatml")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDENS / "qwen3" / name, home / name)
    found = trained.describe(str(home), 0, [], "generate")
    made, library = generate.open_talk(found), found.text().of.library
    assert library.decode(made.prompt([{"role": "user", "content": "why?"}]), skip_special_tokens=False) == \
        "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
    assert library.token_to_id("<|im_end|>") in made.stop_ids and made.stops == ()
    refused(call(generate.main, home, "--chat", "--prompt", "a<|im_end|>"), "prompt 1 holds '<|im_end|>'",
            "special token")


# ---- what is refused -------------------------------------------------------------------------------------------------

@pytest.mark.long
def test_experts_answer_alike_on_every_mesh(tiny, tmp_path):
    """Their width, 36, is not divided by tensor 8; the run's own sample is made on its own devices."""
    ran = call(train.main, *tiny, "--model.num_experts=4", "--model.experts_per_token=2",
               "--model.expert_mlp_dim=36", "--model.num_layers=2",
               "--model.mlps=de*", "--model.num_heads=8", "--training.steps=2",
               "--model.compute_dtype=float32", "--run.dir", tmp_path)
    assert (ran.code, ran.err) == (0, "") and "a sample (" in ran.out, ran
    asked = (tmp_path, "--prompt=line 1", "--prompt=7", "--max-tokens=6", "--json")
    found = call(generate.main, *asked, "--mesh.tensor=1")
    assert (found.code, found.err) == (0, ""), found
    for mesh in (("--mesh.data=2", "--mesh.fsdp=2", "--mesh.tensor=2"), ("--mesh.tensor=8",)):
        assert call(generate.main, *asked, *mesh) == found


FIVE = ("--prompt-ids", "[[5]]")


def test_a_prompt_is_what_editors_call_a_line(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffone\x0cmore\u2028and\x85on\r\n\n two\n".encode())
    assert generate._lines(str(tmp_path / "a.txt"), False) == ["one\x0cmore\u2028and\x85on", " two"]
    (tmp_path / "a.jsonl").write_bytes('\ufeff{"prompt": "one\u2028two"}\r\n\n{"prompt": "b"}\n'.encode())
    assert generate._lines(str(tmp_path / "a.jsonl"), False) == ["one\u2028two", "b"]
    (tmp_path / "b.jsonl").write_text('{"prompt": "a"}\n\n{}\n')
    with pytest.raises(config.ConfigError, match="b.jsonl: line 3 is not"):
        generate._lines(str(tmp_path / "b.jsonl"), False)


def test_prompts_longer_than_a_model_are_refused():
    for name, count, parts in (("gpt2", 129, ("has 129 tokens", "128 learned positions")),
                               ("qwen3", 513, ("512 tokens", "max_position_embeddings"))):
        refused(call(generate.main, GOLDENS / name, "--prompt-ids", json.dumps([[5] * count])), *parts)


def test_a_temperature_that_logits_cannot_be_divided_by_is_refused():
    refused(call(generate.main, GOLDENS / "qwen3", *FIVE, "--temperature=1e-39"), "--temperature 1e-39", "1e-06 and more")


@pytest.mark.parametrize("name", ["prompt", "stop"])
def test_words_that_are_not_utf_8_are_told(name):
    refused(call(generate.main, GOLDENS / "qwen3", *(FIVE if name == "stop" else ()), f"--{name}=\udcff"),
            f"--{name} '\\udcff' is not UTF-8")


@pytest.mark.parametrize(("files", "wanted"), [
    ({"config.json": {"eos_token_id": 5}, "generation_config.json": {"eos_token_id": [7, 9]}}, (7, 9)),
    ({"config.json": {"eos_token_id": 5}, "generation_config.json": {}}, (5,)),
    ({"config.json": {"eos_token_id": None}}, ())])
def test_stop_ids_are_those_of_the_generation_config_then_of_the_config(files, wanted, tmp_path):
    shutil.copytree(GOLDENS / "qwen3", tmp_path / "folder")
    for name, change in files.items():
        path = tmp_path / "folder" / name
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | change))
    assert trained.describe(str(tmp_path / "folder"), 0, [], "generate").ends.ids == wanted
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": "two"}))
    refused(call(generate.main, tmp_path / "folder", *FIVE), 'eos_token_id="two" is not a token id')
