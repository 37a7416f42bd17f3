"""A tiny causal language model with a character tokenizer, made on the spot: no download, a second to build.

The vocabulary is `<pad> <bos> <eos> <unk>` and then `string.printable`, so one character is one token and expected
ids can be worked out by hand: '0' is 4, '7' is 11, 'a' is 14, '+' is 76, '=' is 84, and "1+1=" is [5, 76, 5, 84].
Characters outside the vocabulary are dropped.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any, Literal

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(4)
VOCABULARY_SIZE = len(SPECIAL_TOKENS) + len(string.printable)  # 104
MAX_POSITIONS = 512

# The generation prompt ends in "A:", a system message comes first, and every turn ends in <eos>.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ {'system': 'S:', 'user': 'U:', 'assistant': 'A:'}[message['role']] + message['content'] + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'A:' }}{% endif %}"
)

Architecture = Literal["qwen2", "llama", "gemma3"]


def make_tiny_model(
    path: Path | str,
    *,
    tied: bool = False,
    architecture: Architecture = "qwen2",
    seed: int = 0,
    dtype: str = "float32",
    attention_dropout: float = 0.0,
    with_template: bool = False,
    hidden: int = 128,
) -> Path:
    """Write config, seeded random weights, generation config and tokenizer to the folder `path` and return it.

    `hidden` makes it less tiny.
    """
    import torch
    from transformers import Gemma3ForCausalLM, GenerationConfig, LlamaForCausalLM, Qwen2ForCausalLM

    kinds: dict[str, Any] = {"qwen2": Qwen2ForCausalLM, "llama": LlamaForCausalLM, "gemma3": Gemma3ForCausalLM}
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden}
    config = _tiny_config(architecture, tie_word_embeddings=tied, attention_dropout=attention_dropout, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kinds[architecture](config)
    model.generation_config = GenerationConfig(pad_token_id=PAD_ID, bos_token_id=BOS_ID, eos_token_id=EOS_ID)
    return _save(model, Path(path), dtype, with_template)


def make_tiny_reward_model(
    path: Path | str,
    *,
    architecture: Architecture = "qwen2",
    seed: int = 1,
    dtype: str = "float32",
    labels: int = 1,
    pad_id: int = PAD_ID,
    attention_dropout: float = 0.0,
) -> Path:
    """Write a sequence-classification model of the same shape to the folder `path` and return it.

    Its scores of different texts differ by about 1. `pad_id` is what transformers' own pooling takes for padding.
    """
    import torch
    from transformers import LlamaForSequenceClassification, Qwen2ForSequenceClassification

    config = _tiny_config(architecture, attention_dropout=attention_dropout, num_labels=labels)
    config.pad_token_id = pad_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind: Any = Qwen2ForSequenceClassification if architecture == "qwen2" else LlamaForSequenceClassification
        model = kind(config)
    return _save(model, Path(path), dtype, with_template=False)


def _tiny_config(architecture: Architecture, **settings: Any) -> Any:
    from transformers import Gemma3TextConfig, LlamaConfig, Qwen2Config

    settings = {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS,
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        # Wide enough that next-token distributions are far from uniform, so that a wrong weight shows in log-probs.
        "initializer_range": 0.1,
        **settings,
    }
    if architecture == "gemma3":
        # Both of its kinds of layer; the window is longer than any text here.
        kinds = ["sliding_attention", "full_attention"]
        heads = {"head_dim": 32, "query_pre_attn_scalar": 32, "layer_types": kinds, "sliding_window": MAX_POSITIONS}
        return Gemma3TextConfig(**{**settings, **heads})
    return Qwen2Config(**settings) if architecture == "qwen2" else LlamaConfig(**settings)


def _save(model: Any, folder: Path, dtype: str, with_template: bool) -> Path:
    """Write the model and its tokenizer."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    make_tiny_tokenizer(with_template=with_template).save_pretrained(folder)
    return folder


def make_tiny_tokenizer(*, with_template: bool = False) -> Any:
    """Return the character tokenizer; with a template it can render chats, otherwise `chat_template` is None."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # AutoTokenizer loads every model of type qwen2 as Qwen2Tokenizer, which rebuilds the tokenizer as byte-level
    # pairs from vocabulary and merges alone. So it is byte-level here too, which spells a space 'Ġ' and a newline
    # 'Ċ'; without merges every character stands for itself.
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    for character in string.printable:
        ((spelling, _),) = byte_level.pre_tokenize_str(character)
        vocabulary[spelling] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    if with_template:
        fast.chat_template = CHAT_TEMPLATE
    return fast
