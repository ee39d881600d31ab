"""python -m meshtrain.generate RUN_DIR|HF_DIR --prompt TEXT|--prompts FILE|--prompt-ids JSON|--chat [option …]: what a
model goes on with.

RUN_DIR: a run's directory, its newest checkpoint or --step N. HF_DIR: a model folder of Hugging Face's.
--prompt TEXT, as often as wanted; --prompts FILE: a prompt on each line, of .jsonl {"prompt": …}; --prompt-ids '[[5,
6], [7]]': token ids, for which no tokenizer is needed. --chat: a conversation by the chat template, a question on each
line that you type; with --prompt or --prompts, of .jsonl also {"messages": [...]}, each is a conversation of its own.
--max-tokens N (256)    tokens of an answer at most
--temperature T (0)     0: the most likely token; else drawn; 1 where one of the next three is given
--top-k K, --top-p P, --min-p P    what is left to draw from, as in transformers
--seed N (0)            the same seed draws the same answer to a prompt, whatever else is asked and on any mesh
--stop TEXT             ends an answer, as often as wanted, beside the model's own end tokens
--json                  only JSON on stdout: {"completions": [{"prompt_ids", "token_ids", "text", "stopped":
"stop"|"length"}]} --mesh.data, --mesh.fsdp, --mesh.tensor N: devices that have prompts of their own, and that share
weights (all on tensor without a word of it); --mesh.simulated_devices N: on the CPU. --model.compute_dtype,
--run.compilation_cache, --data.tokenizer: as in a run. Exit codes: 0 · 2 the user's mistake, one message · 75 stopped
on request · 1 anything else.
"""
from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Sequence

from meshtrain.run import command, say, stops

if __name__ == "__main__":      # before jax is imported: its C++ reports what it does not find
    say.begin()
    stops.listen("stopped")
    with say.without_noise():
        importlib.import_module("jax")

import jax

from meshtrain import assembly, config, devices, talk, trained
from meshtrain.checkpoint.checkpoint import CheckpointError
from meshtrain.config import ConfigError
from meshtrain.inference.detokenizer import TextStream, Words
from meshtrain.inference.generate import MOST_ROWS, Completion, GenerationLimits
from meshtrain.inference.sampling import Picking
from meshtrain.units import size

USAGE = ("python -m meshtrain.generate RUN_DIR|HF_DIR --prompt TEXT|--prompts FILE|--prompt-ids JSON|--chat "
         "[--max-tokens N] [--temperature T] [--json]")
NUMBERS = {     # option -> (kind, default, the least, the most, what it is, an example)
    "step": (int, 0, 0, math.inf, "the number of a saved step, or 0 for the newest", "100"),
    "max-tokens": (int, 256, 1, 10**7, "a number of tokens, at least 1", "256"),
    "temperature": (float, None, 0, math.inf, "0 for the most likely token, or more", "0.8"),
    "top-k": (int, 0, 1, math.inf, "a number of tokens, at least 1", "50"),
    "top-p": (float, 1.0, 0, 1, "a probability", "0.9"),
    "min-p": (float, 0.0, 0, 1, "a share", "0.05"),
    "seed": (int, 0, 0, 2**32 - 1, "a whole number from 0 on", "1"),
}
TEXTS = {"prompt": "'Once upon a time'", "prompts": "prompts.txt", "prompt-ids": "'[[5, 6], [7]]'", "stop": "END"}
MOST_PROMPT_BYTES = 1 << 28     # of a file of prompts


def main(argv: Sequence[str]) -> int:
    return command.answer(_generate, argv, USAGE, __doc__, (CheckpointError, assembly.BrokenProgramError))


def _generate(argv: list[str]) -> None:
    options, texts, directory, rest = options_of(argv)
    found = trained.describe(directory, options["step"], rest, "generate",
                             keys=("data.tokenizer", "data.chat_template"))
    talking = talk.open_talk(found) if options["chat"] else None
    words = _words(found, texts, talking)
    prompts = _prompts(found, texts, talking)
    ended = (lambda _, tokens: words.ended(tokens)) if words and words.stops else None
    limits = GenerationLimits(options["max-tokens"], words.stop_ids if words else found.stop_ids(),
                              found.longest(), ended)
    _check(prompts, found, limits)
    placed = found.place()
    _check_memory(placed, prompts or [[]], limits)
    with jax.set_mesh(placed.mesh):
        if prompts:
            _answer(placed.generator(), prompts, limits, words, options)
        else:
            _converse(placed.generator(), found, talking, limits, words, options)


def _answer(generator, prompts: list[list[int]], limits: GenerationLimits, words: Words | None, options: dict) -> None:
    """Makes the completions and says them: as JSON, or as text, of one prompt while it comes."""
    ask = lambda tell=None: generator.complete(prompts, limits, _picking(options), options["seed"], tell)
    if options["json"]:
        say.out(json.dumps({"completions": [_as_json(one, words) for one in ask()]}))
    elif words is None:
        for one in ask():
            say.out(" ".join(map(str, one.tokens)))
    elif len(prompts) == 1:
        _streamed(words, ask)
    else:
        for number, one in enumerate(ask()):
            prompt = json.dumps(words.decode(one.prompt), ensure_ascii=False)
            say.out(f"--- {number + 1}: {prompt}\n{words.text(one.tokens)}")


def _picking(options: dict) -> Picking:
    return Picking(options["temperature"], options["top-k"], options["top-p"], options["min-p"])


def _streamed(words: Words, ask) -> str:
    """The text of the one answer of `ask`, told as it comes."""
    stream = TextStream(words)
    (one,) = ask(lambda _, tokens: say.part(stream.more(tokens)))
    say.out(stream.rest(one.tokens))
    return words.text(one.tokens)


def _converse(generator, found: trained.Trained, talking: talk.Talk, limits: GenerationLimits,
              words: Words, options: dict) -> None:
    """Answers each line of stdin, the conversation so far before it; ends where stdin ends."""
    messages: list[dict] = []
    if hasattr(sys.stdin, "reconfigure"):       # what is not UTF-8 costs a line and not the conversation, in any locale
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    while True:
        if say.on_terminal():
            say.part("> ")
        line = sys.stdin.readline()
        if not line:
            return
        if not line.strip():
            continue
        if not _is_text(line):
            say.err("error: that line is not UTF-8, and is left out; type it again, or set the terminal to UTF-8")
            continue
        asked = [*messages, {"role": "user", "content": line.rstrip("\n")}]
        try:
            with config.user_errors():
                prompt = talking.prompt(asked)
            _check([prompt], found, limits)
        except ConfigError as error:        # of this question alone
            say.err(f"error: {error}")
            continue
        answer = _streamed(words,
                           lambda tell: generator.complete([prompt], limits, _picking(options), options["seed"], tell))
        messages = [*asked, {"role": "assistant", "content": answer}]


def _as_json(one: Completion, words: Words | None) -> dict:
    return {"prompt_ids": one.prompt, "token_ids": one.tokens, "text": words.text(one.tokens) if words else None,
            "stopped": one.stopped}


def _check(prompts: list[list[int]], found: trained.Trained, limits: GenerationLimits) -> None:
    """Raises: ConfigError with every prompt that the model cannot take."""
    vocab_size, faults = found.run.model.vocab_size, []
    for number, prompt in enumerate(prompts):
        if beyond := [one for one in prompt if not 0 <= one < vocab_size]:
            faults.append(f"prompt {number + 1} has the id {beyond[0]}, and the model's vocabulary has 0 to "
                          f"{vocab_size - 1}; give others, or the tokenizer that belongs to the model")
        if limits.length and len(prompt) > limits.length:
            what = ("learned positions" if found.run.model.position == "learned" else
                    "tokens of its config.json (max_position_embeddings)")
            faults.append(f"prompt {number + 1} has {len(prompt)} tokens, and the model takes sequences of at most the "
                          f"{limits.length} {what}; shorten it")
    if faults:
        raise ConfigError(*faults)


def _check_memory(placed: trained.LoadedModel, prompts: list[list[int]], limits: GenerationLimits) -> None:
    """Raises: ConfigError where the keys and values alone are more than the devices hold."""
    cfg, rows, longest = placed.model.cfg, min(len(prompts), MOST_ROWS), max(map(len, prompts))
    tokens = longest + (min(limits.tokens, limits.length) if limits.length else limits.tokens)
    held = 2 * rows * tokens * cfg.num_layers * cfg.num_kv_heads * cfg.head_dim * placed.ex.dtype.itemsize
    if held > (has := devices.memory_bytes(placed.mesh.devices.flatten())):
        raise ConfigError(f"--max-tokens {limits.tokens}: the keys and values of {rows} × {tokens} tokens take "
                          f"{size(held)}, and the devices have {size(has)}; ask for fewer tokens, or of fewer prompts "
                          f"at once")


# ---- the command line ------------------------------------------------------------------------------------------------


def _words(found: trained.Trained, texts: dict[str, list[str]], talking: talk.Talk | None) -> Words | None:
    """How answers become text; None without a tokenizer. Raises: ConfigError."""
    text, stops = found.text(), tuple(texts["stop"])
    if text is None:
        if option := next((name for name in ("prompt", "prompts", "stop") if texts[name]), None):
            raise ConfigError(f"--{option} needs a tokenizer, and {found.directory} has none; give --data.tokenizer "
                              f"the path of a tokenizer.json, or token ids, --prompt-ids '[[5, 6], [7]]'")
        return None
    stop_ids = found.stop_ids()
    if talking:
        stops, stop_ids = stops + talking.stops, tuple(dict.fromkeys(stop_ids + talking.stop_ids))
    return Words(text.decode, stops, stop_ids)


def _prompts(found: trained.Trained, texts: dict[str, list[str]], talking: talk.Talk | None) -> list[list[int]]:
    """The prompts as ids; none where a conversation is to be held. Raises: ConfigError."""
    if texts["prompt-ids"]:
        return _ids(texts["prompt-ids"][-1])
    given = texts["prompt"] or (_lines(texts["prompts"][-1], bool(talking)) if texts["prompts"] else [])
    prompts = []
    for number, one in enumerate(given):
        if not one:
            raise ConfigError(f"prompt {number + 1} is empty; give the text that the model is to go on with")
        with config.user_errors(f"prompt {number + 1} "):
            if talking:
                prompts.append(talking.prompt(one if isinstance(one, list) else [{"role": "user", "content": one}]))
            else:
                prompts.append(list(found.text().prompt(one)))
        if not prompts[-1]:
            raise ConfigError(f"of the prompt {json.dumps(one)} the tokenizer leaves no token; give another")
    return prompts


def _ids(text: str) -> list[list[int]]:
    """The prompts of --prompt-ids. Raises: ConfigError."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    if isinstance(given, list) and given and all(type(one) is int for one in given):
        given = [given]
    if not isinstance(given, list) or not all(
            isinstance(one, list) and all(type(i) is int for i in one) for one in given):
        raise ConfigError(f"--prompt-ids {text[:60]} is not a list of lists of whole numbers; write e.g. '[[5, 6], "
                          f"[7]]'")
    if not given or not all(given):
        raise ConfigError(f"--prompt-ids {text[:60]} has an empty prompt; give at least one token of each, e.g. '[[5, "
                          f"6], [7]]'")
    return given


def _lines(path: str, chats: bool) -> list:
    """The prompts of a file, a line each, as editors count them: what else Unicode calls a line break is text. chats:
    they may be lists of messages. Raises: ConfigError."""
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_PROMPT_BYTES + 1)
        text = content.decode("utf-8-sig") if len(content) <= MOST_PROMPT_BYTES else None
    except OSError as error:
        raise ConfigError(f"--prompts {path} cannot be read: {error.strerror}; name a file with a prompt on each "
                          f"line") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompts {path} is not text (byte {error.start} is not UTF-8); name a file of "
                          f"UTF-8") from None
    if text is None:
        raise ConfigError(f"--prompts {path} is larger than {MOST_PROMPT_BYTES:,} bytes; name a file of prompts")
    lines = text.replace("\r\n", "\n").split("\n")
    found = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ConfigError(f"--prompts {path} is empty; write a prompt on each line")
    return [_of_json(path, number, line, chats) if path.endswith(".jsonl") else line for number, line in found]


def _is_text(words: str) -> bool:
    """Whether all of what the command line or stdin gave was UTF-8: Python hands on other bytes as lone surrogates."""
    try:
        words.encode()
    except UnicodeEncodeError:
        return False
    return True


def _of_json(path: str, number: int, line: str, chats: bool):
    try:
        given = json.loads(line)
    except (ValueError, RecursionError):
        given = None
    given = given if isinstance(given, dict) else {}
    messages = given.get("messages")
    if chats and isinstance(messages, list) and messages and all(isinstance(one, dict) for one in messages):
        return messages
    if not isinstance(given.get("prompt"), str):
        raise ConfigError(f'--prompts {path}: line {number} is not {{"prompt": "…"}}{" or {messages: [...]}" * chats}; '
                          f'write one such '
                          "object a line")
    return given["prompt"]


def options_of(argv: list[str]) -> tuple[dict, dict[str, list[str]], str, list[str]]:
    """(numbers and flags by name, texts by name, the directory, what is left for `config.resolve`). Raises:
    ConfigError."""
    asked = config.split(argv, USAGE, TEXTS | {name: example for name, (*_, example) in NUMBERS.items()},
                         ("json", "chat"))
    faults = list(asked.faults)
    texts = {name: asked.values.get(name, []) for name in TEXTS}
    flags = {name: name in asked.flags for name in ("json", "chat")}
    numbers = {name: _number(name, asked.last(name), faults) for name in NUMBERS if asked.last(name)}
    if len(asked.names) != 1 and not faults:      # the value of what is no option would be another name
        few = f" ({asked.names[0]}, {asked.names[1]})" if asked.names else ""
        faults.append(f"{len(asked.names)} directories are named{few}, where one run's directory or model folder is "
                      f"asked for; the usage is {USAGE}")
    kinds = [name for name in ("prompt", "prompts", "prompt-ids") if texts[name]]
    faults += [f"--{name} {ascii(one)[:60]} is not UTF-8; give text in UTF-8, or token ids, --prompt-ids '[[5, 6], "
               f"[7]]'"
               for name in ("prompt", "stop") for one in texts[name] if not _is_text(one)]
    if faults:
        raise ConfigError(*faults)
    if len(kinds) != 1 and not (flags["chat"] and not kinds) or flags["chat"] and texts["prompt-ids"]:
        faults.append("give one of --prompt TEXT, --prompts FILE and --prompt-ids '[[5, 6], [7]]', or --chat, alone or "
                      "with one of the first two")
    elif flags["json"] and not kinds:
        faults.append("--chat --json has no prompts; give --prompt TEXT or --prompts FILE, or leave --json out to talk")
    if faults:
        raise ConfigError(*faults)
    drawn = any(name in numbers for name in ("top-k", "top-p", "min-p"))
    defaults = {name: default for name, (_, default, *_) in NUMBERS.items()} | {"temperature": 1.0 if drawn else 0.0}
    return {**defaults, **numbers, **flags}, texts, asked.names[0], asked.keys


def _number(name: str, text: str, faults: list[str]):
    kind, default, least, most, what, example = NUMBERS[name]
    try:
        value = kind(text)
    except (ValueError, OverflowError):
        value = math.nan
    if not least <= value <= most or value == math.inf or name == "top-p" and value == 0:
        faults.append(f"--{name} {text} is not {what}; give e.g. --{name} {example}")
        return default
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
