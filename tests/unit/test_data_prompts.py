"""Prompts: ids as the engine gets them, rows that can't be used, ids that stay the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.schema import DataConfig, JsonlPrompts, ReasoningGymPrompts
from rlhf.data import DataError, LoadedPrompts, load_prompts, load_tokenizer
from tests.tiny import make_tiny_tokenizer

# "1+1=" in the vocabulary of tests/tiny.py.
ONE_PLUS_ONE = (5, 76, 5, 84)
BOS, EOS = 1, 2


def tokenizer(*, template: str | None = None, adds_bos: bool = False) -> Any:
    made = make_tiny_tokenizer()
    made.chat_template = template
    if adds_bos:
        from tokenizers.processors import TemplateProcessing

        made.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return made


def write(folder: Path, *rows: object) -> Path:
    """A JSON Lines file; texts are written as they are."""
    file = folder / "prompts.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def load(folder: Path, *rows: object, using: Any = None, answer: str | None = None, **data: Any) -> LoadedPrompts:
    source = JsonlPrompts(source="jsonl", path=write(folder, *rows), answer=answer)
    data.setdefault("chat_template", False)
    return load_prompts(source, DataConfig(prompts=source, **data), using or tokenizer())


def test_a_template_with_bos_and_a_tokenizer_that_adds_bos_give_one(tmp_path: Path) -> None:
    template = "{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}"
    using = tokenizer(template=template, adds_bos=True)
    assert using("<bos>1+1=<eos>").input_ids == [BOS, BOS, *ONE_PLUS_ONE, EOS]  # the way to two of them
    (prompt,) = load(tmp_path, {"prompt": "1+1="}, using=using, chat_template=True).prompts
    assert prompt.token_ids == (BOS, *ONE_PLUS_ONE, EOS)


@pytest.mark.parametrize("adds_bos", [True, False])
def test_without_a_template_the_ids_are_the_tokenizers_own(tmp_path: Path, adds_bos: bool) -> None:
    using = tokenizer(adds_bos=adds_bos)
    (prompt,) = load(tmp_path, {"prompt": "1+1="}, using=using).prompts
    assert prompt.token_ids == tuple(using("1+1=").input_ids) == ((BOS,) if adds_bos else ()) + ONE_PLUS_ONE


def test_a_template_that_is_asked_for_and_absent_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no chat template: set data.chat_template: false"):
        load(tmp_path, {"prompt": "1+1="}, chat_template=True)


def test_a_bos_in_the_text_besides_the_tokenizers_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"prompts.jsonl:1: the prompt begins with two <bos> tokens"):
        load(tmp_path, {"prompt": "<bos>1+1="}, using=tokenizer(adds_bos=True))


def test_the_generation_prompt_and_the_system_prompt_come_from_the_template(tmp_path: Path) -> None:
    using = make_tiny_tokenizer(with_template=True)
    loaded = load(tmp_path, {"prompt": "1+1="}, using=using, chat_template=True, system_prompt="add")
    assert using.decode(loaded.prompts[0].token_ids) == "S:add<eos>U:1+1=<eos>A:"
    assert loaded.prompts[0].text == "1+1="


def test_chat_messages_are_rendered_and_rewards_see_the_last_message_of_the_user(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
    ]
    using = make_tiny_tokenizer(with_template=True)
    (prompt,) = load(tmp_path, {"prompt": messages}, using=using, chat_template=True).prompts
    assert using.decode(prompt.token_ids) == "U:1<eos>A:2<eos>U:3<eos>A:"
    assert prompt.text == "3"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "has no message of the user"),
        ([{"role": "user", "content": " "}], "has no message of the user"),
        ([{"role": "user"}], "message 0: a message is an object with the texts 'role' and 'content'"),
        (["1+1="], "message 0"),
        (
            [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}],
            "ends with the assistant's message",
        ),
        ([{"role": "tool", "content": "1"}, {"role": "user", "content": "2"}], "the chat template refuses this prompt"),
        ([{"role": "system", "content": "1"}, {"role": "user", "content": "2"}], "a system message of its own"),
    ],
)
def test_conversations_that_cannot_be_answered_are_refused(tmp_path: Path, messages: list[object], reason: str) -> None:
    using = make_tiny_tokenizer(with_template=True)
    with pytest.raises(DataError, match=reason):
        load(tmp_path, {"prompt": messages}, using=using, chat_template=True, system_prompt="add")


def test_chat_messages_without_a_template_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"chat messages need data.chat_template: true"):
        load(tmp_path, {"prompt": [{"role": "user", "content": "1"}]})


def test_lines_that_cannot_be_used_are_all_named_with_file_line_and_field(tmp_path: Path) -> None:
    rows = [
        {"prompt": "1+1="},
        "{broken",
        {"question": "1+1="},
        {"prompt": "  "},
        {"prompt": 3},
        "[1]",
        {"prompt": None},
    ]
    with pytest.raises(DataError) as caught:
        load(tmp_path, *rows)
    message = str(caught.value)
    assert message.startswith(f"6 unusable lines in {tmp_path / 'prompts.jsonl'}")
    assert "prompts.jsonl:2: not valid JSON" in message
    assert "prompts.jsonl:3: field 'prompt' (data.prompts.prompt) is missing; the line has 'question'" in message
    assert "prompts.jsonl:4: field 'prompt' is empty" in message
    assert "prompts.jsonl:5: field 'prompt' must be text or a list of chat messages, not int" in message
    assert "prompts.jsonl:6: a line must be a JSON object, not list" in message
    assert "and 1 more" in message


def test_a_file_that_is_not_utf8_is_refused_with_the_line(tmp_path: Path) -> None:
    file = tmp_path / "latin.jsonl"
    file.write_bytes(b'{"prompt": "1"}\n{"prompt": "caf\xe9"}\n')
    source = JsonlPrompts(source="jsonl", path=file)
    with pytest.raises(DataError, match=r"latin.jsonl:2: not UTF-8 text"):
        load_prompts(source, DataConfig(prompts=source, chat_template=False), tokenizer())


def test_an_empty_file_is_refused_and_blank_lines_are_no_rows(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no lines"):
        load(tmp_path, "", " ")
    assert len(load(tmp_path, "", {"prompt": "1"}, "", {"prompt": "2"}).prompts) == 2


def test_a_line_may_hold_any_character_that_json_allows(tmp_path: Path) -> None:
    # U+2028 ends a line for str.splitlines, not for JSON Lines.
    assert len(load(tmp_path, '{"prompt": "1\u2028+1="}').prompts) == 1


def test_the_answer_is_found_under_its_own_name_and_the_row_is_kept(tmp_path: Path) -> None:
    row = {"prompt": "1+1=", "label": "2", "level": 3}
    (prompt,) = load(tmp_path, row, answer="label").prompts
    assert prompt.fields == {**row, "answer": "2"}
    with pytest.raises(DataError, match=r"field 'label' \(data.prompts.answer\) is missing"):
        load(tmp_path, {"prompt": "1+1="}, answer="label")


def test_overlong_prompts_are_an_error_that_names_them_or_dropped_and_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1="}, {"prompt": "1+1=2"}, {"prompt": "1"}]
    long = load(tmp_path, *rows).prompts[1]
    with pytest.raises(DataError) as caught:
        load(tmp_path, *rows, max_prompt_tokens=4)
    assert "1 prompts are longer than data.max_prompt_tokens = 4" in str(caught.value)
    assert f"prompt {long.prompt_id} ({tmp_path / 'prompts.jsonl'}:2): 5 tokens" in str(caught.value)
    loaded = load(tmp_path, *rows, max_prompt_tokens=4, overlong_prompts="drop")
    assert ([p.text for p in loaded.prompts], loaded.dropped) == (["1+1=", "1"], 1)
    with pytest.raises(DataError, match="no prompt is left: all 3"):
        load(tmp_path, *rows[:2], {"prompt": "12"}, max_prompt_tokens=1, overlong_prompts="drop")


def test_prompt_ids_depend_on_the_content_of_the_row_alone(tmp_path: Path) -> None:
    first = load(tmp_path, {"prompt": "1", "a": 1}, {"prompt": "2"}).prompts
    second = load(tmp_path, {"prompt": "2"}, {"a": 1, "prompt": "1"}).prompts
    assert [p.prompt_id for p in first] == [p.prompt_id for p in reversed(second)]
    assert first[0].prompt_id != first[1].prompt_id


# --- reasoning-gym


def problems(task: str = "chain_sum", **settings: Any) -> LoadedPrompts:
    source = ReasoningGymPrompts(source="reasoning_gym", task=task, **{"size": 3, **settings})
    return load_prompts(source, DataConfig(prompts=source, chat_template=False), tokenizer())


def test_problems_carry_what_their_own_score_needs() -> None:
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    loaded = problems(options=options)
    assert len(loaded.prompts) == 3
    prompt = loaded.prompts[0]
    assert prompt.text == "State the final answer to the following arithmetic problem: 4 + 3 ="
    assert prompt.fields["answer"] == "7"
    problem = prompt.fields["reasoning_gym"]
    assert (problem["task"], problem["options"]) == ("chain_sum", options)

    from reasoning_gym.factory import create_dataset

    dataset = create_dataset(problem["task"], **problem["options"])
    assert dataset.score_answer("7", problem["entry"]) == 1.0
    assert dataset.score_answer("8", problem["entry"]) < 1.0


def test_another_seed_gives_other_problems() -> None:
    assert problems(seed=42).prompts == problems(seed=42).prompts
    assert not {p.prompt_id for p in problems(seed=42).prompts} & {p.prompt_id for p in problems(seed=1000).prompts}


def test_problems_are_the_same_in_every_process() -> None:
    # This task walks over a set of text, whose order differs between processes.
    code = (
        "from rlhf.data.sources import read_rows\n"
        "from rlhf.config.schema import ReasoningGymPrompts\n"
        "source = ReasoningGymPrompts(source='reasoning_gym', task='isomorphic_strings', size=3)\n"
        "print([row.prompt_id for row in read_rows(source)])"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1] != ""


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"task": "chain_summ"}, "has no task 'chain_summ'; did you mean 'chain_sum'"),
        ({"options": {"min_term": 2}}, "options.min_term: .* did you mean 'min_terms'"),
        ({"options": {"min_terms": 3, "max_terms": 2}}, "max_terms must be >= min_terms"),
    ],
)
def test_tasks_and_options_that_do_not_exist_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        problems(**settings)


# --- tokenizer


def test_a_tokenizer_is_loaded_from_the_models_folder(tmp_path: Path) -> None:
    make_tiny_tokenizer(with_template=True).save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path))("1+1=").input_ids == list(ONE_PLUS_ONE)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"model.path: the tokenizer of {tmp_path} can't be loaded"):
        load_tokenizer(str(tmp_path))
