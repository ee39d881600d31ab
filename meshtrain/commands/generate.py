"""Generates text with a model: python -m meshtrain.generate RUN_DIR or HF_DIR, with one of --prompt, --prompts,
--prompt-ids and --chat.

RUN_DIR: a run directory. HF_DIR: a Hugging Face model folder. --mesh.data N, --mesh.fsdp N, --mesh.tensor N: the mesh.
Prompts are divided over data; weights are sharded over fsdp and tensor. Without these options, all devices are on
tensor. --mesh.simulated_devices N: simulate devices on the CPU. --model.compute_dtype, --run.compilation_cache,
--data.tokenizer: as in a run file. Exit codes: 0 · 1 any other failure · 2 a mistake in the settings · 75 stopped on
request.
"""
from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence

import jax
import pydantic

from meshtrain import assembly, config, devices, files, trained
from meshtrain.checkpoint.store import CheckpointError
from meshtrain.config import ConfigError
from meshtrain.data.documents import chat, conversations, tokenizer
from meshtrain.huggingface.weights import ends
from meshtrain.inference import cache
from meshtrain.inference.detokenizer import TextStream, Words
from meshtrain.inference.generate import SLOTS, GenerationLimits
from meshtrain.inference.sampling import Picking
from meshtrain.run import command, say
from meshtrain.units import size

LEAST_TEMPERATURE = 1e-6        # the minimum of rl.temperature, too


def _ids(text: str) -> list[list[int]]:
    """Return the prompts of --prompt-ids. Raises: ValueError."""
    try:
        given = pydantic.TypeAdapter(list[int] | list[list[int]]).validate_json(text, strict=True)
    except ValueError:
        raise ValueError("is not a list of lists of whole numbers; write e.g. '[[5, 6], [7]]'") from None
    if given and isinstance(given[0], int):
        given = [given]
    if not given or not all(given):
        raise ValueError("has an empty prompt; give at least one token for each, e.g. '[[5, 6], [7]]'")
    return given


def _text(text: str) -> str:
    if not _is_text(text):
        raise ValueError("is not UTF-8; give text in UTF-8, or token ids, --prompt-ids '[[5, 6], [7]]'")
    return text


def _temperature(text: str) -> float:
    what = f"0 for the most likely token, or {LEAST_TEMPERATURE:g} and more"
    value = config.number(what)(text)
    if 0 < value < LEAST_TEMPERATURE:       # logits divided by it would overflow
        raise ValueError(f"is not {what}")
    return value


def _is_text(words: str) -> bool:
    """Return whether a text from outside was UTF-8. Python represents other bytes as lone surrogates."""
    try:
        words.encode()
    except UnicodeEncodeError:
        return False
    return True


COMMAND = config.Command("meshtrain.generate", config.OF_TRAINED | {
    "prompt": config.Option("a text to continue", "TEXT", "'Once upon a time'", _text, many=True),
    "prompts": config.Option('a file with a prompt on each line; in .jsonl each line is {"prompt": …}', "FILE",
                             "prompts.txt"),
    "prompt-ids": config.Option("token ids; needs no tokenizer", "JSON", "'[[5, 6], [7]]'", _ids),
    "chat": config.Option('chat with the model by its chat template: type one question per line. With --prompt or '
                          '--prompts, each prompt is a separate conversation; .jsonl may have {"messages": [...]}'),
    "samples": config.Option("number of answers per prompt", "N", "4",
                             config.whole(1), 1),
    "max-tokens": config.Option("maximum tokens of an answer", "N", "256", config.whole(1, 10**7), 256),
    "temperature": config.Option("0: the most likely token; else sampled (default 0; 1 with --top-k, --top-p, --min-p)",
                                 "T", "0.8", _temperature),
    "top-k": config.Option("sample from the K most likely tokens, as in transformers", "K", "50", config.whole(1), 0),
    "top-p": config.Option("sample from the most likely tokens with this total probability", "P", "0.9",
                           config.number("a probability", 0, 1, positive=True), 1.0),
    "min-p": config.Option("sample from tokens with at least this share of the largest probability", "P", "0.05",
                           config.number("a share", 0, 1), 0.0),
    "draft": config.Option("number of depths of multi-token prediction that draft tokens, which the model verifies: "
                           "the same answers in fewer passes", "N", "1", config.whole(), 0),
    "seed": config.Option("the same seed gives the same answer to a prompt, with any other prompts and on any mesh",
                          "N", "1", config.whole(0, 2**32 - 1), 0),
    "stop": config.Option("a text that ends an answer, in addition to the model's end tokens", "TEXT", "END", _text,
                          many=True),
    "json": config.Option('print only JSON: {"completions": [{"prompt_ids", "token_ids", "text", "stopped": '
                          '"stop"|"length"}]}'),
}, "RUN_DIR|HF_DIR", (1, 1))
TEMPLATE, ARGUMENTS = "data.chat_template", "data.template_arguments"
MOST_PROMPT_BYTES = 1 << 28     # maximum size of a file of prompts


@command.entry(COMMAND, __doc__, (CheckpointError, assembly.BrokenProgramError))
def main(options: config.Arguments) -> None:
    _check_options(options)
    source = trained.describe(options.names[0], options["step"], options.keys, "generate",
                              keys=("data.tokenizer", TEMPLATE, ARGUMENTS), weights=options["weights"],
                              merge=options["merge"], drafts=options["draft"])
    if (given := [key for key in (TEMPLATE, ARGUMENTS) if key in source.given]) and not options["chat"]:
        raise ConfigError(f"--{given[0]} is not read without --chat, since prompts are then texts that no chat "
                          f"template renders; add --chat, or leave it out")
    talking = open_talk(source) if options["chat"] else None
    words = _words(source, options, talking)
    _tell(source, plain=bool(options["prompt"] or options["prompts"]) and not talking)
    prompts = _prompts(source, options, talking)
    limits = GenerationLimits(options["max-tokens"], words.stop_ids if words else source.ends.ids,
                              source.longest(), words.at_string if words else None)
    _check(prompts, source, limits)
    with config.user_errors():
        cache.check(source.run.model)
    placed = source.place()
    _check_memory(placed, prompts or [[]], limits, options["samples"])
    with jax.set_mesh(placed.mesh):
        generator = placed.generator(options["draft"])
        if prompts:
            _answer(generator, prompts, limits, words, options)
        else:
            _converse(generator, source, talking, limits, words, options)
    if options["draft"] and (longer := [sum(n for tokens, n in generator.counts.items() if tokens > k)
                                        for k in range(generator.drafts + 1)])[0]:
        shares = ", ".join(f"{n / longer[0]:.0%} of depth {k}" for k, n in enumerate(longer[1:], 1))
        say.err(f"drafts: {sum(longer) / longer[0]:.2f} tokens per pass of a sequence; accepted {shares}")


def _tell(source: trained.Trained, plain: bool) -> None:
    """Print notes about the tokenizer. plain: prompts are texts without a chat template."""
    text = source.text()
    of = text and text.of
    for note in (*getattr(of, "notes", ()), *filter(None, [plain and getattr(of, "beginning", "")])):
        say.err(f"note: {note}")


def _answer(generator, prompts: list[list[int]], limits: GenerationLimits, words: Words | None,
            options: config.Arguments) -> None:
    """Generate the completions and print them as JSON or text. The text of a single completion is streamed."""
    samples = options["samples"]

    def ask(tell=None):
        return generator.complete(prompts, limits, _picking(options), options["seed"], tell, [samples] * len(prompts))

    if options["json"]:
        say.answer(json.dumps({"completions": [
            {"prompt_ids": answer.prompt, "token_ids": answer.tokens,
             "text": words.text(answer.tokens) if words else None, "stopped": answer.stopped} for answer in ask()]}))
    elif words is None:
        for answer in ask():
            say.out(" ".join(map(str, answer.tokens)))
    elif len(prompts) * samples == 1:
        _stream(words, ask)
    else:
        for number, answer in enumerate(ask()):
            prompt = json.dumps(words.decode(answer.prompt), ensure_ascii=False)
            sample = f", answer {number % samples + 1}" if samples > 1 else ""
            say.out(f"--- {number // samples + 1}{sample}: {prompt}\n{words.text(answer.tokens)}")


def _picking(options: config.Arguments) -> Picking:
    drawn = bool(options.given & {"top-k", "top-p", "min-p"})
    return Picking(float(drawn) if options["temperature"] is None else options["temperature"],
                   options["top-k"], options["top-p"], options["min-p"])


def _stream(words: Words, ask) -> str:
    """Print the text of the only answer of `ask` while it is generated. Return the text."""
    stream = TextStream(words)
    (answer,) = ask(lambda _, tokens: say.part(stream.more(tokens)))
    say.out(stream.rest(answer.tokens))
    return words.text(answer.tokens)


def _converse(generator, source: trained.Trained, talking: Talk, limits: GenerationLimits,
              words: Words, options: config.Arguments) -> None:
    """Answer each line of stdin as the next message of one conversation, until stdin ends."""
    messages: list[dict] = []
    if hasattr(sys.stdin, "reconfigure"):       # a line that is not UTF-8 is skipped, in any locale
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
            say.err("error: that line is not UTF-8 and is skipped; type it again, or set the terminal to UTF-8")
            continue
        asked = [*messages, {"role": "user", "content": line.rstrip("\n")}]
        try:
            with config.user_errors():
                prompt = talking.prompt(asked)
            _check([prompt], source, limits)
        except ConfigError as error:        # concerns only this question
            say.err(f"error: {error}")
            continue
        answer = _stream(words,
                         lambda tell: generator.complete([prompt], limits, _picking(options), options["seed"], tell))
        messages = [*asked, {"role": "assistant", "content": answer}]


def _check(prompts: list[list[int]], source: trained.Trained, limits: GenerationLimits) -> None:
    """Check token ids and lengths of prompts. Raises: ConfigError with every prompt that the model cannot process."""
    vocab_size, faults = source.run.model.vocab_size, []
    for number, prompt in enumerate(prompts):
        if beyond := [token for token in prompt if not 0 <= token < vocab_size]:
            faults.append(f"prompt {number + 1} has the id {beyond[0]}, but the model's vocabulary has ids 0 to "
                          f"{vocab_size - 1}; give other ids, or the tokenizer that belongs to the model")
        if limits.length and len(prompt) > limits.length:
            what = ("learned positions" if source.run.model.position == "learned" else
                    "tokens of its config.json (max_position_embeddings)")
            faults.append(f"prompt {number + 1} has {len(prompt)} tokens, but the model supports sequences of at most "
                          f"the {limits.length} {what}; shorten it")
    if faults:
        raise ConfigError(*faults)


def _check_memory(placed: trained.LoadedModel, prompts: list[list[int]], limits: GenerationLimits,
                  samples: int) -> None:
    """Check the memory. Raises: ConfigError if the keys and values alone exceed the memory of the devices."""
    rows, tokens = min(len(prompts) * samples, SLOTS), max(len(prompt) + limits.of(prompt) for prompt in prompts)
    held = rows * cache.slot_bytes(placed.model.cfg, tokens, placed.ex.numerics.dtype.itemsize)
    if held > (has := devices.memory_bytes(placed.mesh.devices.flatten())):
        raise ConfigError(f"--max-tokens {limits.tokens}: the keys and values of {rows} × {tokens} tokens take "
                          f"{size(held)}, and the devices have {size(has)}; use a smaller --max-tokens, or fewer "
                          f"prompts at a time")


# ---- chat ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Talk:
    """A chat template with its stop tokens and stop strings."""
    template: chat.Template
    stop_ids: tuple[int, ...]
    stops: tuple[str, ...]

    def prompt(self, messages: Sequence[dict], tools: list | None = None, arguments: dict | None = None) -> list[int]:
        """Return the token ids of a conversation up to the begin of the model's answer. Raises: ValueError."""
        return chat.prompt(self.template, messages, tools, arguments).tolist()


def open_talk(source: trained.Trained) -> Talk:
    """Return the chat template of a model. Raises: ConfigError without a tokenizer or a template."""
    text = source.text()
    if text is None:
        raise ConfigError(f"--chat needs a tokenizer, but {source.directory} has none; set --data.tokenizer to the "
                          f"path of a tokenizer.json with a chat template next to it")
    with config.user_errors():
        template = chat.open_template(_chat_reader(source, text), source.run.data.chat_template,
                                      [source.files] if source.files else [], today=True,
                                      arguments=dict(source.run.data.template_arguments))
        written = ends.of_template(template)
        return Talk(template, written.ids, written.stops)


def _chat_reader(source: trained.Trained, text: trained.Text) -> tokenizer.Tokenizer:
    """Return the tokenizer as data with a chat template is read with it. Raises: ValueError."""
    if not isinstance(text.of, tokenizer.Published):
        return text.of
    ids = [token for token in (source.separator(), *source.ends.ids) if token is not None]
    name = next(filter(None, tokenizer.names_of(text.of.path, *ids)), "")
    return tokenizer.open_file(text.of.path, name)


# ---- the command line ------------------------------------------------------------------------------------------------


def _words(source: trained.Trained, options: config.Arguments, talking: Talk | None) -> Words | None:
    """Return the detokenizer with the ends of answers; None without a tokenizer. Raises: ConfigError."""
    text, stops = source.text(), tuple(options["stop"])
    if text is None:
        if option := next((name for name in ("prompt", "prompts", "stop") if options[name]), None):
            raise ConfigError(f"--{option} needs a tokenizer, but {source.directory} has none; set --data.tokenizer "
                              f"to the path of a tokenizer.json, or to bytes; or give token ids, "
                              f"--prompt-ids '[[5, 6], [7]]'")
        return None
    stops, stop_ids = stops + source.ends.stops, source.ends.ids
    if talking:
        stops, stop_ids = stops + talking.stops, talking.stop_ids + stop_ids
    return Words(text.decode, tuple(dict.fromkeys(stops)), tuple(dict.fromkeys(stop_ids)))


def _prompts(source: trained.Trained, options: config.Arguments, talking: Talk | None) -> list[list[int]]:
    """Return the prompts as token ids; [] for an interactive chat. Raises: ConfigError."""
    if options["prompt-ids"]:
        return options["prompt-ids"]
    given = options["prompt"] or (_lines(options["prompts"], bool(talking)) if options["prompts"] else [])
    prompts = []
    for number, prompt in enumerate(given):
        if not prompt:
            raise ConfigError(f"prompt {number + 1} is empty; give a text that the model can continue")
        with config.user_errors(f"prompt {number + 1} "):
            if talking:
                prompts.append(talking.prompt(*prompt) if isinstance(prompt, tuple) else
                               talking.prompt([{"role": "user", "content": prompt}]))
            else:
                prompts.append(list(source.text().prompt(prompt)))
        if not prompts[-1]:
            raise ConfigError(f"the tokenizer gives no token for the prompt {json.dumps(prompt)}; give another prompt")
    return prompts


def _lines(path: str, chats: bool) -> list:
    """Return the prompts of a file, one per line. Lines end with \\n or \\r\\n; other line breaks of Unicode are part
    of the text. chats: a prompt may be a list of messages. Raises: ConfigError."""
    try:
        content = files.read_start(path, MOST_PROMPT_BYTES)
        text = content.decode("utf-8-sig") if len(content) <= MOST_PROMPT_BYTES else None
    except OSError as error:
        raise ConfigError(f"--prompts {path} cannot be read: {error.strerror}; give a file with a prompt on each "
                          f"line") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompts {path} is not text (byte {error.start} is not UTF-8); give a file in "
                          f"UTF-8") from None
    if text is None:
        raise ConfigError(f"--prompts {path} is larger than {MOST_PROMPT_BYTES:,} bytes; give a smaller file")
    lines = text.replace("\r\n", "\n").split("\n")
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ConfigError(f"--prompts {path} is empty; write a prompt on each line")
    return [_of_json(path, number, line, chats) if path.endswith(".jsonl") else line for number, line in numbered]


def _of_json(path: str, number: int, line: str, chats: bool) -> str | tuple[list[dict], list | None, dict | None]:
    """Return the prompt of a JSON line: a text, or (messages, tools, arguments). Raises: ConfigError."""
    try:
        given = json.loads(line)
    except (ValueError, RecursionError):
        given = None
    given = given if isinstance(given, dict) else {}
    key = "messages" if given.get("messages") is not None else "prompt"
    if chats and (key == "messages" or isinstance(given.get(key), list)):
        with config.user_errors(f"--prompts {path}, line {number}: "):
            return (conversations.read_messages(given[key], key), conversations.read_tools(given),
                    conversations.read_arguments(given))
    if not isinstance(given.get("prompt"), str):
        raise ConfigError(f'--prompts {path}: line {number} is not {{"prompt": "…"}}{" or {messages: [...]}" * chats}; '
                          'write one such object a line')
    return given["prompt"]


def _check_options(options: config.Arguments) -> None:
    kinds = options.given & {"prompt", "prompts", "prompt-ids"}
    if len(kinds) != 1 and not (options["chat"] and not kinds) or options["chat"] and "prompt-ids" in kinds:
        raise ConfigError("give one of --prompt TEXT, --prompts FILE and --prompt-ids '[[5, 6], [7]]', or --chat, "
                          "alone or with --prompt or --prompts")
    if options["chat"] and options["json"] and not kinds:
        raise ConfigError("--chat --json has no prompts; give --prompt TEXT or --prompts FILE, or leave --json out to "
                          "talk")
    if (samples := options["samples"]) > 1 and not kinds:
        raise ConfigError(f"--samples {samples}: --chat has one answer per question; give --prompt TEXT or "
                          f"--prompts FILE, or leave --samples out")
    if samples > 1 and _picking(options).temperature == 0:
        raise ConfigError(f"--samples {samples}: at temperature 0 all answers to a prompt are equal; give e.g. "
                          f"--temperature 1")
