"""Chat with a trained model: prompts by the chat template of its folder, and the stop tokens or strings of its answers.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from meshtrain import config, trained
from meshtrain.config import ConfigError
from meshtrain.data.documents import chat, tokenizer

PROBE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@dataclasses.dataclass(frozen=True)
class Talk:
    """A chat template with its stop tokens and stop strings."""
    template: chat.Template
    stop_ids: tuple[int, ...]
    stops: tuple[str, ...]

    def prompt(self, messages: Sequence[dict]) -> list[int]:
        """The ids of a conversation up to where the model answers. Raises: ValueError."""
        return chat.prompt(self.template, messages).tolist()


def open_talk(found: trained.Trained) -> Talk:
    """Raises: ConfigError without a tokenizer or a template."""
    text = found.text()
    if text is None:
        raise ConfigError(f"--chat needs a tokenizer, and {found.directory} has none; give --data.tokenizer the path "
                          f"of a tokenizer.json with a chat template beside it")
    with config.user_errors():
        template = chat.open_template(_reader(found, text), found.run.data.chat_template,
                                      [found.files] if found.files else [], today=True)
        return Talk(template, *_endings(template))


def _reader(found: trained.Trained, text: trained.Text) -> tokenizer.Tokenizer:
    """The tokenizer as `data` opens it. Raises: ValueError."""
    if not isinstance(text.of, tokenizer.Published):
        return text.of
    ids = [one for one in (found.separator(), *found.stop_ids()) if one is not None]
    name = next(filter(None, tokenizer.names_of(text.of.path, *ids)), "")
    return tokenizer.open_file(text.of.path, name)


def _endings(template: chat.Template) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """(stop tokens, stop strings): the first special token after an answer and the tokenizer's eos_token; for byte
    tokenizers the text that the template writes after an answer."""
    prompt = chat.prompt(template, PROBE[:1]).tolist()
    (whole,) = chat.encode(template, [chat.Conversation(PROBE, [True, True])], learn_all=True)
    ids = np.asarray(whole.ids).tolist()
    behind = ids[len(prompt):] if ids[:len(prompt)] == prompt else []
    if template.library is None:
        written = bytes(behind).decode(errors="replace").partition(PROBE[1]["content"])[2]
        return (), tuple(filter(None, [written.strip() or (written if "\n" in written else "")]))
    special = {number for number, token in template.library.get_added_tokens_decoder().items() if token.special}
    ends = [next((one for one in behind if one in special), None),
            template.library.token_to_id(template.tokens.get("eos_token", ""))]
    return tuple(dict.fromkeys(one for one in ends if one is not None)), ()
