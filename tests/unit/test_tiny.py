"""The tiny model is what the tests' hand-worked ids say it is, and survives a round trip through its folder."""

from __future__ import annotations

import json
import string
from pathlib import Path

import pytest

from tests.tiny import BOS_ID, EOS_ID, PAD_ID, UNK_ID, Architecture, make_tiny_model

ARCHITECTURES: tuple[Architecture, ...] = ("qwen2", "llama")


def _load_tokenizer(folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_ids_are_the_ones_that_tests_work_out_by_hand(tmp_path: Path, architecture: Architecture) -> None:
    tokenizer = _load_tokenizer(make_tiny_model(tmp_path / "tiny", architecture=architecture))
    # Four specials, then string.printable: '0'-'9' are 4-13, 'a' is 14, '+' is the 72nd printable after 4 specials.
    assert tokenizer("1+1=").input_ids == [5, 76, 5, 84]
    assert tokenizer("7a").input_ids == [11, 14]
    assert (PAD_ID, BOS_ID, EOS_ID, UNK_ID) == (0, 1, 2, 3)
    assert tokenizer.convert_tokens_to_ids(["<pad>", "<bos>", "<eos>", "<unk>"]) == [0, 1, 2, 3]
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert len(tokenizer) == 104


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_printable_character_is_one_token_and_decodes_to_itself(
    tmp_path: Path, architecture: Architecture
) -> None:
    tokenizer = _load_tokenizer(make_tiny_model(tmp_path / "tiny", architecture=architecture))
    assert tokenizer(string.printable).input_ids == list(range(4, 104))
    assert tokenizer.decode(list(range(4, 104))) == string.printable
    assert tokenizer.decode([5, EOS_ID], skip_special_tokens=True) == "1"


def test_chat_template_is_there_only_when_asked_for(tmp_path: Path) -> None:
    plain = _load_tokenizer(make_tiny_model(tmp_path / "plain"))
    chat = _load_tokenizer(make_tiny_model(tmp_path / "chat", with_template=True))
    assert plain.chat_template is None
    messages = [{"role": "user", "content": "1+1="}]
    rendered = chat.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "U:1+1=<eos>A:"
    # 'U' is 4 + 10 + 26 + 20 = 60, 'A' is 40, ':' is 81.
    assert chat(rendered, add_special_tokens=False).input_ids == [60, 81, 5, 76, 5, 84, 2, 40, 81]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_saved_model_loads_with_the_head_tied_or_not(tmp_path: Path, tied: bool, architecture: Architecture) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = make_tiny_model(tmp_path / "tiny", tied=tied, architecture=architecture, dtype="bfloat16")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == architecture
    assert model.dtype == torch.bfloat16
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == EOS_ID


def test_seed_decides_the_weights_and_leaves_the_global_generator_alone(tmp_path: Path) -> None:
    import torch

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    files = [make_tiny_model(tmp_path / str(i), seed=seed) / "model.safetensors" for i, seed in enumerate((1, 1, 2))]
    assert torch.equal(torch.rand(3), expected)
    first, again, other = (file.read_bytes() for file in files)
    assert first == again
    assert first != other
