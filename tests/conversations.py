"""Conversations for tests: drawn with awkward texts, and written through templates of several families.

`python tests/conversations.py`, where transformers is installed, writes tests/goldens/chat/masks.txt anew: for each of
500 conversations the number of ids, that of the assistant's, and a hash of ids and masks, by `apply_chat_template` with
`return_assistant_tokens_mask=True`. Made with transformers 5.24 and tokenizers 0.23; the tests need neither.
"""
import hashlib
import json
import random
from pathlib import Path

import numpy as np

HOME = Path(__file__).resolve().parent / "goldens" / "chat"
COUNT = 500
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|header|>", "<|eot|>", "<unk>")
WORDS = ["the", "cat", "sat", "on", "a", "mat", "answer", "why", "don't", "42", "3.14",
         "naïve", "Zürich", "你好", "猫", "🐈", "👩‍👩‍👧", "e\u0301",
         "\u200b", "İ", "ﬁ", "{{ messages }}", "{% raw %}", "[INST]", "<b>", "\\n", "def f(x):",
         "\treturn x", "  ", "\n", "\n\n", "\r\n", ".",
         ",", "?", "!", "<|im", "_end|>", "</s", ">", "user", "assistant", "\u00a0", "\ufdd0"]
TEMPLATES = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% "
              "generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}{{ m['content'] + "
              "'<|im_end|>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% "
              "endif %}",
    "llama3": "{{- bos_token }}\n{%- for message in messages %}\n    {{- '<|header|>' + message.role + "
              "'<|header|>\\n\\n' }}\n    {%- if message.role == 'assistant' %}\n        {%- generation %}\n        "
              "{{- message.content | trim + '<|eot|>' }}\n        {%- endgeneration %}\n    {%- else %}\n        {{- "
              "message.content | trim + '<|eot|>' }}\n    {%- endif %}\n{%- endfor %}\n{%- if add_generation_prompt "
              "%}\n    {{- '<|header|>assistant<|header|>\\n\\n' }}\n{%- endif %}\n",
    # The answer begins and ends within what may be one token with its surroundings, and has no end of its own.
    "plain": "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% "
             "endgeneration %}{% else %}{{ m.content }}{% endif %} {% endfor %}",
    "inst": "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}<<{{ m.content }}>>{% elif m.role == "
            "'user' %}[INST] {{ m.content }} [/INST]{% else %}{% generation %} {{ m.content }}{{ eos_token }}{% "
            "endgeneration %}{% endif %}{% endfor %}",
}
TOKENIZERS = {"chatml": "bytes", "llama3": "bytes", "plain": "bytes", "inst": "words"}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def text(rng: random.Random) -> str:
    """Almost names of special tokens, and none."""
    count = rng.choice((1, 1, 2, 5, 12, 40))
    made = "".join(rng.choice(WORDS) + rng.choice(("", " ", " ", " ")) for _ in range(count))
    for name in SPECIAL:
        made = made.replace(name, name[:-1])
    return made


def drawn(number: int) -> tuple[str, list[dict]]:
    """(name of the template, messages) of conversation `number`: turns in turn, or whatever order."""
    rng = random.Random(number)
    name = sorted(TEMPLATES)[number % len(TEMPLATES)]
    messages = [{"role": "system", "content": text(rng)}] if rng.random() < 0.3 else []
    for turn in range(rng.randint(1, 8)):
        role = ("user", "assistant")[turn % 2] if rng.random() < 0.9 else rng.choice(("user", "assistant"))
        messages.append({"role": role, "content": text(rng)})
    return name, messages


def golden(ids, mask) -> str:
    """A line of the file."""
    raw = np.asarray(ids, "<i4").tobytes() + np.asarray(mask, np.uint8).tobytes()
    return f"{len(ids)} {int(np.sum(mask))} {hashlib.blake2b(raw, digest_size=8).hexdigest()}"


def folder(directory: Path, name: str) -> Path:
    """A tokenizer's folder with the template `name`, half of them as newer, half as older folders have it."""
    home = directory / name
    if not home.exists():
        home.mkdir()
        (home / "tokenizer.json").write_bytes((HOME / f"{TOKENIZERS[name]}.json").read_bytes())
        config = dict(TOKENS)
        if name in ("chatml", "inst"):
            (home / "chat_template.jinja").write_text(TEMPLATES[name])
        elif name == "llama3":
            config["chat_template"] = [{"name": "tool_use", "template": "{{ 1 / 0 }}"},
                                       {"name": "default", "template": TEMPLATES[name]}]
        else:
            config |= {"chat_template": TEMPLATES[name], "bos_token": {"content": "<s>", "__type": "AddedToken"}}
        (home / "tokenizer_config.json").write_text(json.dumps(config))
    return home


def write_tokenizers() -> None:
    """A BPE over bytes, and one with spaces as ▁ and unknown characters as bytes, as SentencePiece makes them."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
    corpus = [message["content"] for number in range(COUNT)
              for message in drawn(number)[1]] + ["user: assistant: system"] * 50
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=400, special_tokens=list(SPECIAL),
                                                         show_progress=False,
                                                         initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    made.save(str(HOME / "bytes.json"))
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.ByteFallback()
    made.train_from_iterator([one for one in corpus if one.isascii()], trainers.BpeTrainer(
        vocab_size=500, special_tokens=[*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))], show_progress=False))
    value = json.loads(made.to_str())
    for token in value["added_tokens"]:
        token["special"] = not token["content"].startswith("<0x")
    value["added_tokens"] = [token for token in value["added_tokens"] if token["special"]]
    (HOME / "words.json").write_text(json.dumps(value, ensure_ascii=False))


def write_goldens() -> None:
    from transformers import PreTrainedTokenizerFast
    loaded = {name: PreTrainedTokenizerFast(tokenizer_file=str(HOME / f"{kind}.json"),
                                            chat_template=TEMPLATES[name], **TOKENS)
              for name, kind in TOKENIZERS.items()}
    lines = []
    for number in range(COUNT):
        name, messages = drawn(number)
        made = loaded[name].apply_chat_template(messages, tokenize=True, return_dict=True,
                                                return_assistant_tokens_mask=True)
        lines.append(golden(made["input_ids"], made["assistant_masks"]))
    (HOME / "masks.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    if not (HOME / "words.json").exists():
        write_tokenizers()
    write_goldens()
