"""What ends an answer is said in one place: what the training wrote first, then what the weights came with."""
import json
from pathlib import Path
from types import SimpleNamespace

import conversations as drawn
import numpy as np
import pytest
from commands import call, in_a_directory_of_its_own, ran  # noqa: F401
from safetensors.numpy import save_file

from meshtrain import config, run_files, trained
from meshtrain.checkpoint import resume
from meshtrain.commands import generate
from meshtrain.data.documents import chat, tokenizer
from meshtrain.huggingface.weights import ends
from meshtrain.huggingface.weights.ends import Ends

# Ids of tests/goldens/chat/bytes.json.
BOS, EOS, START, TURN, HEADER, EOT = range(6)
CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
VOCAB = 400


def home(directory: Path, template: str = CHATML, **files) -> Path:
    """A folder with a tokenizer and no weights. files: NAME_json -> its content; None: it is not there."""
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.json").write_bytes((drawn.HOME / "bytes.json").read_bytes())
    if template:
        (directory / "chat_template.jinja").write_text(template)
    base = {"config": {"model_type": "llama", "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": 6},
            "tokenizer_config": dict(drawn.TOKENS)}
    for name, content in (base | files).items():
        if content is not None:
            (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def template_of(directory: Path, text: str, reader=None) -> chat.Template:
    place = home(directory, text)
    return chat.open_template(reader or tokenizer.open_file(str(place / "tokenizer.json")), str(place))


@pytest.mark.parametrize(("text", "wanted"), [
    (drawn.TEMPLATES["chatml"], Ends((TURN, EOS), turn=TURN)),
    (drawn.TEMPLATES["llama3"], Ends((EOT, EOS), turn=EOT)),
    (drawn.TEMPLATES["inst"], Ends((EOS,), turn=EOS)),
    # a generation prompt that no answer begins with, and one whose last token grows together with the answer
    (CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif"), Ends((TURN, EOS), turn=TURN)),
    ("{% for m in messages %}{{ m.role + ': ' + m.content + '<|eot|>' }}{% endfor %}{% if add_generation_prompt %}"
     "{{ 'assistant: ' }}{% endif %}", Ends((EOT, EOS), turn=EOT)),
    ("<|header|>a zebra<|eot|>" + CHATML.replace("m.content", "m.content | upper"), Ends((TURN, EOS), turn=TURN)),
    ("{% for m in messages %}{{ '<|eot|>' }}{% endfor %}", Ends((EOS,))),
    # without a special token: the text, but no white space, which answers have inside
    ("{% for m in messages %}{{ m.role + ': ' + m.content + '###\n' }}{% endfor %}", Ends((EOS,), ("###",))),
    (drawn.TEMPLATES["plain"], Ends((EOS,)))])
def test_a_template_tells_what_it_writes_behind_an_answer(text, wanted, tmp_path):
    assert ends.of_template(template_of(tmp_path / "home", text)) == wanted


def test_of_bytes_an_answer_ends_with_the_templates_text(tmp_path):
    place = home(tmp_path / "home", "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}")
    assert ends.of_template(chat.open_template(tokenizer.Bytes(), str(place))) == Ends(stops=("\n",))


def data(place: Path | None, source: str = "text", **keys) -> config.Data:
    named = {"tokenizer": str(place / "tokenizer.json")} if place else {}
    return config.Data(source=source, paths=["x"], **named, **keys)


MIXTURE = [{"source": "chat", "paths": ["a"]}, {"source": "text", "paths": ["b"]}]


@pytest.mark.parametrize(("source", "keys", "ids"), [
    ("text", {}, (BOS, EOS)), ("text", {"eos": "<|eot|>"}, (EOT, EOS)), ("text", {"eos": "</s>"}, (EOS,)),
    ("chat", {}, (TURN, EOS)), ("preferences", {}, (TURN, EOS)), ("chat", {"eos": "<|eot|>"}, (TURN, EOS, EOT)),
    ("prompts", {}, (TURN, EOS, BOS)), ("prompts", {"eos": "<|eot|>"}, (TURN, EOS, EOT)),
    ("mixture", {"mixture": MIXTURE}, (TURN, EOS, BOS)), ("mixture", {"mixture": MIXTURE[1:]}, (BOS, EOS))])
def test_what_the_training_wrote_comes_first(source, keys, ids, tmp_path):
    place = home(tmp_path / "home")
    found = ends.of_data(data(place, source, **keys), VOCAB, ends.of_folder(place), [place])
    assert (found.ids, found.note, found.bos) == (ids, "", BOS)
    assert found.turn == (TURN if source in ("chat", "preferences", "prompts") or len(ids) == 3 else None)


def test_a_template_that_teaches_no_end_is_told_and_texts_need_none(tmp_path):
    before = Ends((EOS,))
    place = home(tmp_path / "plain", drawn.TEMPLATES["plain"])
    found = ends.of_data(data(place, "chat"), VOCAB, before, [place])
    assert found.ids == (EOS,) and "does not learn to stop" in found.note
    early = home(tmp_path / "early", drawn.TEMPLATES["chatml"].replace(
        " + '<|im_end|>' }}{% endgeneration %}", " }}{% endgeneration %}{{ '<|im_end|>' }}"))
    found = ends.of_data(data(early, "chat"), VOCAB, before, [early])
    assert found.ids == (TURN, EOS) and "closes {% generation %} before <|im_end|> (3)" in found.note
    assert ends.of_data(data(early, "chat", loss_on="all"), VOCAB, before, [early]).note == ""
    refusing = home(tmp_path / "refusing", "{{ raise_exception('never') }}")
    assert "unknown" in ends.of_data(data(refusing, "chat"), VOCAB, before, [refusing]).note
    none = home(tmp_path / "none", "")
    assert ends.of_data(data(none, "prompts"), VOCAB, before, []) == Ends((BOS, EOS), bos=BOS)
    assert ends.of_data(data(None, "stdlib"), 257, Ends(), []) == Ends((256,), bos=256)


# ---- the end of documents --------------------------------------------------------------------------------------------


def begins(place: Path, **keys) -> config.Run:
    of = data(place, **keys) if "tokenizer" not in keys else config.Data(paths=["x"], **keys)
    return config.Run(data=of, model={"vocab_size": VOCAB}, checkpoint={"init_from": str(place)})


@pytest.mark.parametrize(("named", "generation", "keys", "eos", "part"), [
    (EOS, None, {}, "</s>", "documents end with </s> (1), the eos_token_id of"),
    ([EOT, EOS], {"eos_token_id": [TURN]}, {}, "<|eot|>", "(5)"),
    (None, {"eos_token_id": TURN}, {}, "<|im_end|>", "(3)"),
    (BOS, None, {}, "", None), ([EOS, BOS], None, {}, "", None), (EOS, {"eos_token_id": [EOS, BOS]}, {}, "", None),
    (None, None, {}, "", None),
    (EOS, None, {"eos": "<|eot|>"}, "<|eot|>", None), (EOS, None, {"source": "chat"}, "</s>", None),
    (77, None, {}, "", "is not a special token of data.tokenizer; set data.eos to use another"),
    (1000, None, {}, "", "is not a special token"),
    (EOS, None, {"tokenizer": "bytes", "source": "text"}, "", None),
    (EOS, None, {"tokenizer": "bytes", "source": "tokens", "bos_token": "0"}, "1", "documents end with 1")])
def test_documents_end_as_the_folder_names_it_where_the_run_file_names_nothing(
        named, generation, keys, eos, part, tmp_path):
    place = home(tmp_path / "home", config={"model_type": "llama", "bos_token_id": BOS, "eos_token_id": named},
                 generation_config=generation)
    found, line = ends.default(begins(place, **keys), None)
    assert found == eos and (part in line and "set data.eos to use another" in line if part else line == "")


def test_a_run_that_starts_from_another_ends_documents_as_that_one_did(tmp_path):
    place = home(tmp_path / "home")
    saved = lambda eos: SimpleNamespace(run={"data": {"eos": eos}})
    assert ends.default(begins(place), saved("<|eot|>"))[0] == "<|eot|>"
    assert ends.default(begins(place), saved(""))[0] == "</s>"
    assert ends.default(begins(place), saved("<gone>")) == ("", "")


def test_a_checkpoint_of_an_earlier_version_says_what_ended_its_documents(tmp_path):
    place = home(tmp_path / "home")
    saved = SimpleNamespace(run={"data": data(place).model_dump(), "model": {"vocab_size": VOCAB}},
                            metadata={"data": {"tokenizer": ["key", BOS]}})
    assert ends.of_saved(saved, place) == Ends((BOS, EOS), bos=BOS)
    saved.run["data"]["tokenizer"] = "gone.json"
    found = ends.of_saved(saved, None)
    assert (found.ids, found.bos) == ((), BOS) and "gone.json" in found.note
    saved.metadata["data"]["ends"] = {"ids": [TURN], "stops": ["#"], "turn": TURN}
    assert ends.of_saved(saved, None) == Ends((TURN,), ("#",), TURN, BOS)


# ---- exports ---------------------------------------------------------------------------------------------------------


def written(tmp_path: Path, given: Ends, **files) -> tuple[dict | None, dict, Path]:
    """(generation_config.json, tokenizer_config.json, the folder) of an export."""
    source = home(tmp_path / "source", **files)
    place = home(tmp_path / "place", **files)
    ends.write_ends(place, source, given)
    generation = place / "generation_config.json"
    return json.loads(generation.read_text()) if generation.exists() else None, json.loads(
        (place / "tokenizer_config.json").read_text()), place


def test_an_export_names_what_was_taught_first_and_what_its_base_has(tmp_path):
    generation, beside, place = written(tmp_path, Ends((TURN, EOS), turn=TURN), generation_config={
        "eos_token_id": EOS, "temperature": 0.7}, special_tokens_map={"eos_token": {"content": "</s>", "lstrip": True}})
    assert generation == {"eos_token_id": [TURN, EOS], "temperature": 0.7}
    assert beside == drawn.TOKENS | {"eos_token": "<|im_end|>"}
    assert json.loads((place / "special_tokens_map.json").read_text()) == {
        "eos_token": {"content": "<|im_end|>", "lstrip": True}}
    assert ends.of_folder(place).ids == (TURN, EOS)


def test_without_a_generation_config_one_is_made_from_the_config(tmp_path):
    generation, beside, _ = written(tmp_path, Ends((BOS, EOS)))
    assert generation == {"bos_token_id": BOS, "pad_token_id": 6, "eos_token_id": [BOS, EOS]}
    assert beside == drawn.TOKENS, "documents that end otherwise make no other eos_token"


def test_of_a_run_from_random_weights_the_tokenizers_files_name_the_end_of_turn(tmp_path):
    place = home(tmp_path / "place")
    ends.write_ends(place, None, Ends((TURN,), turn=TURN))
    assert json.loads((place / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"
    assert not (place / "generation_config.json").exists(), "config.json names the ends"


def test_an_export_with_the_ends_of_its_base_stays_as_it_is(tmp_path):
    same = '{"eos_token_id":   1}'
    source = home(tmp_path / "home")
    (source / "generation_config.json").write_text(same)
    ends.write_ends(source, source, Ends((EOS,), turn=EOS))
    assert (source / "generation_config.json").read_text() == same
    assert json.loads((source / "tokenizer_config.json").read_text()) == drawn.TOKENS


def test_a_template_that_writes_eos_token_keeps_it(tmp_path):
    text = CHATML.replace("{% if add", "{{ eos_token }}{% if add")
    place = home(tmp_path / "home", text)
    ends.write_ends(place, place, Ends((TURN, EOS), turn=TURN))
    assert json.loads((place / "tokenizer_config.json").read_text()) == drawn.TOKENS
    assert ends.of_folder(place).ids == (TURN, EOS)


# ---- runs ------------------------------------------------------------------------------------------------------------


def bigrams(place: Path, follows: dict[str, str], **files) -> Path:
    """A model folder whose likeliest next token is a function of the last one."""
    width = VOCAB
    shape = {"architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "hidden_size": width, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 16,
             "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu", "max_position_embeddings": 64,
             "tie_word_embeddings": False, "torch_dtype": "float32"}
    home(place, config={"model_type": "llama", "bos_token_id": BOS, "eos_token_id": EOS} | shape, **files)
    layer, zeros = "model.layers.0.", lambda *dims: np.zeros(dims, np.float32)
    tensors = {f"{layer}self_attn.{name}_proj.weight": zeros(rows, width) for name, rows in zip("qkv", (16, 8, 8))}
    tensors |= {f"{layer}self_attn.o_proj.weight": zeros(width, 16), f"{layer}mlp.down_proj.weight": zeros(width, 16),
                f"{layer}mlp.gate_proj.weight": zeros(16, width), f"{layer}mlp.up_proj.weight": zeros(16, width),
                "lm_head.weight": zeros(VOCAB, width), "model.embed_tokens.weight": np.eye(VOCAB, dtype=np.float32)}
    tensors |= {name: np.ones(width, np.float32) for name in (
        f"{layer}input_layernorm.weight", f"{layer}post_attention_layernorm.weight", "model.norm.weight")}
    library = tokenizer.open_file(str(place / "tokenizer.json")).library
    for first, then in follows.items():
        tensors["lm_head.weight"][library.token_to_id(then), library.token_to_id(first)] = 4.0
    save_file(tensors, str(place / "model.safetensors"), metadata={"format": "pt"})
    return place


def words(place: Path, name: str, source: str, paths: str, **more) -> list[str]:
    values = {"run.dir": place / name, "mesh.data": 8, "mesh.fsdp": 1, "mesh.tensor": 1, "mesh.simulated_devices": 8,
              "sharding.rules": "sharding_rules/ddp.toml", "data.source": source, "data.paths": json.dumps([paths]),
              "data.tokenizer": place / "base" / "tokenizer.json", "data.seq_len": 32, "data.global_batch": 8,
              "data.validation_fraction": 0, "training.steps": 1, "optimizer.learning_rate": 1e-5,
              "run.sample_tokens": 4, "validation.every": 0, "metrics.tensorboard": "false",
              "run.compilation_cache": place / "cache"}
    return [f"--{key}={value}" for key, value in (values | {key.replace("__", "."): one for key, one in
                                                          more.items()}).items()]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("ends")
    bigrams(place / "base", {"Ċ": "the", "the": "Ġcat", "Ġcat": "<|im_end|>", "<|im_end|>": "Ċ"})
    (place / "prompts.jsonl").write_text("".join(json.dumps(
        {"messages": [{"role": "user", "content": f"say {i}"}], "answer": "the cat"}) + "\n" for i in range(8)))
    for i in range(9):
        (place / f"{i}.txt").write_text("the cat sat. " * 9)
    return place


SHAPE = ("vocab_size", "embed_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_dim", "norm_eps",
         "compute_dtype")
RL = {"training__objective": "rl", "rl__prompts": 4, "rl__samples": 2, "rl__reward": "exact", "rl__temperature": 0.1,
      "rl__reward_workers": 1}


def test_a_run_from_rewards_ends_answers_as_the_template_does_and_its_export_says_so(place):
    said = ran(*words(place, "rl", "prompts", str(place / "prompts.jsonl"), rl__max_tokens=8,
                      checkpoint__init_from=place / "base", checkpoint__export="last", **RL)).out
    row = json.loads((place / "rl/metrics.jsonl").read_text().splitlines()[-1])
    assert (row["truncated"], row["reward"]) == (0, 1)
    assert "answers end with <|im_end|> (3), </s> (1)\n" in said and "no answer ended" not in said
    export = place / "rl/export/1"
    assert json.loads((export / "generation_config.json").read_text())["eos_token_id"] == [TURN, EOS]
    assert json.loads((export / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"
    for found in (place / "rl", export):        # without a template on the way
        asked = call(generate.main, found, "--prompt-ids", "[[5]]", "--max-tokens=1", "--json")
        assert asked.code == 0, asked
        assert trained.describe(str(found), 0, [], "generate").ends.ids == (TURN, EOS)
    shape = {f"model__{key}": value for key, value in resume.checkpoints_of(str(place / "rl")).open(1).run["model"].items()
             if key in SHAPE}
    said = ran(*words(place, "cut", "prompts", str(place / "prompts.jsonl"), rl__max_tokens=2,
                      checkpoint__init_from=place / "rl", **shape, **RL)).out
    assert said.count("no answer ended within rl.max_tokens=2. An answer ends with <|im_end|> (3), </s> (1). Set ") == 1
    assert "easier or harder prompts" not in said


def test_documents_are_taught_the_folders_end_and_a_run_that_goes_on_keeps_its_own(place):
    texts = words(place, "documents", "text", f"{place}/*.txt", checkpoint__init_from=place / "base")
    said = ran(*texts).out
    assert "documents end with </s> (1), the eos_token_id of" in said and "answers end with </s> (1)\n" in said
    assert run_files.load([str(place / "documents/config.toml")]).data.eos == "</s>"
    said = ran(*texts, "--training.steps=2").out
    assert "data.eos" not in said and "answers end with </s> (1)\n" in said
    saved = resume.checkpoints_of(str(place / "documents")).open(2)
    assert saved.run["data"]["eos"] == "</s>" and saved.metadata["data"]["ends"] == {
        "ids": [EOS], "stops": [], "turn": None}
