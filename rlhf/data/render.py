"""From a row to the token ids that an engine gets: once, with at most one beginning-of-sequence token."""

from __future__ import annotations

from typing import Any

from rlhf.config.schema import DataConfig
from rlhf.data.errors import DataError
from rlhf.data.sources import Row

# The part of a Hugging Face tokenizer that is used here: it has no usable types.
Tokenizer = Any


def load_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of a model folder or hub name; raises `DataError` naming it where there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # broken files surface as errors of many libraries
        raise DataError(f"model.path: the tokenizer of {path} can't be loaded: {error}") from error


def check_template(data: DataConfig, tokenizer: Tokenizer) -> None:
    """Refuse a chat template that is asked for and absent."""
    if data.chat_template and not tokenizer.chat_template:
        raise DataError(
            f"data.chat_template is true, but the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat "
            "template: set data.chat_template: false to tokenise prompts as they are, or use a model tuned for chat"
        )


def render(row: Row, data: DataConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The prompt's token ids.

    With a chat template the template alone places special tokens, the beginning of the sequence among them; without
    one the tokenizer does, exactly as in `tokenizer(prompt)`. Raises `DataError` naming the row.
    """
    ids = _with_template(row, data, tokenizer) if data.chat_template else _as_it_is(row, tokenizer)
    if not ids:
        raise DataError(f"{row.place}: the prompt has no tokens")
    bos = tokenizer.bos_token_id
    if bos is not None and ids[:2] == (bos, bos):
        raise DataError(
            f"{row.place}: the prompt begins with two {tokenizer.bos_token} tokens, one of them from its text: remove "
            "it there"
        )
    return ids


def _with_template(row: Row, data: DataConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else list(row.prompt)
    if data.system_prompt is not None:
        if any(message["role"] == "system" for message in messages):
            raise DataError(f"{row.place}: the row has a system message of its own, and data.system_prompt is set too")
        messages = [{"role": "system", "content": data.system_prompt}, *messages]
    try:
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    except Exception as error:  # a template is a program of the model's author and raises what it likes
        raise DataError(f"{row.place}: the chat template refuses this prompt: {error}") from error
    return tuple(encoded["input_ids"])


def _as_it_is(row: Row, tokenizer: Tokenizer) -> tuple[int, ...]:
    if not isinstance(row.prompt, str):
        raise DataError(f"{row.place}: chat messages need data.chat_template: true")
    return tuple(tokenizer(row.prompt).input_ids)
