"""The built-in reward functions: what counts as an answer, what it is worth, and what is an error instead."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf.rewards import RewardInput
from rlhf.rewards.builtin import exact_match, length, reasoning_gym, regex
from rlhf.rewards.extract import Extract, Normalise, equal, find_answer


def sample(response: str, answer: Any = None, **fields: Any) -> RewardInput:
    if answer is not None:
        fields["answer"] = answer
    return RewardInput(prompt="p", response=response, response_ids=tuple(range(len(response))), fields=fields)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("3 + 4 = 7", "7"),
        ("it is 7.", "7"),
        ("7 or 9", "9"),
        ("total: 1,234.50 dollars", "1234.50"),
        ("1, 2, 3", "3"),
        ("= -4", "-4"),
        ("=-4", "-4"),
        ("10-4", "4"),  # a minus between two terms is not a sign
        ("x - 4", "4"),
        ("it is \u22124", "-4"),  # the typographic minus
        ("about .5", ".5"),
        ("well...5", "5"),
        ("version 1.2.3", "3"),
        ("no number", None),
        ("", None),
    ],
)
def test_last_number(text: str, found: str | None) -> None:
    assert find_answer(text, "last_number") == found


@pytest.mark.parametrize(
    ("how", "text", "found"),
    [
        ("tag", "<answer> 5 </answer>", "5"),
        ("tag", "<answer>4</answer> no: <answer>5\n</answer>", "5"),
        ("tag", "<answer>5", None),
        ("tag", "5", None),
        ("boxed", r"Answer: \boxed{5}", "5"),
        ("boxed", r"\boxed{4}, then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("boxed", r"\boxed{\boxed{5}}", r"\boxed{5}"),
        ("boxed", r"\boxed{5", None),
        ("boxed", "5", None),
        ("hashes", "2 + 3 = 5\n#### 5", "5"),
        ("hashes", "#### 4\n#### 5\nbye", "5"),
        ("hashes", "5", None),
        ("whole", " 5 \n", "5"),
    ],
)
def test_answer_is_found_where_it_was_asked_for_and_nowhere_else(how: Extract, text: str, found: str | None) -> None:
    assert find_answer(text, how) == found


@pytest.mark.parametrize(
    ("given", "expected", "normalise", "same"),
    [
        ("1,000.0", "1000", "number", True),
        ("$5.", "5", "number", True),
        ("05", "5", "number", True),
        (".5", "0.50", "number", True),
        ("-5", "5", "number", False),
        ("5 apples", "5", "number", False),
        ("Paris.", "paris", "number", True),
        ("5.0", "5", "text", False),
        ("New  York", "new york", "text", True),
        ("Paris", "paris", "none", False),
        ("paris", "paris", "none", True),
    ],
)
def test_answers_are_compared_by_value_or_by_text(given: str, expected: str, normalise: Normalise, same: bool) -> None:
    assert equal(given, expected, normalise) is same


@pytest.mark.parametrize("gold", ["5", r"\boxed{5}", 5, ["4", "5"]])
def test_right_boxed_answer_scores_1_and_the_box_is_removed_once(gold: Any) -> None:
    response = r"Answer: \boxed{5}"
    assert exact_match([sample(response, gold)], extract="boxed") == [1.0]
    assert exact_match([sample(response, "6")], extract="boxed") == [0.0]
    assert regex([sample(response, gold)], pattern=r"\\boxed\{(.*?)\}", answer_group=1) == [1.0]


def test_a_number_outside_a_required_box_gets_no_credit() -> None:
    assert exact_match([sample("the answer might be 7 or 9", "7")], extract="boxed") == [0.0]


def test_gsm8k_answers_are_read_after_the_hashes() -> None:
    row = "She has 2 + 3 = <<2+3=5>>5 apples.\n#### 1,005"
    samples = [sample("so 1005 it is", row), sample("so 5", row)]
    assert exact_match(samples, extract="last_number", answer_extract="hashes") == [1.0, 0.0]


def test_a_row_without_an_answer_is_an_error_and_not_a_0() -> None:
    with pytest.raises(ValueError, match=r"no 'answer'.*data\.prompts\.answer"):
        exact_match([sample("5")])
    with pytest.raises(ValueError, match="answer_extract: hashes"):
        exact_match([sample("5", "no hashes here")], answer_extract="hashes")


def test_regex_scores_presence_or_the_last_match_against_the_answer() -> None:
    assert regex([sample("a1"), sample("b")], pattern=r"\d") == [1.0, 0.0]
    assert regex([sample("x=4, x=5", "5")], pattern=r"x=(?P<x>\d)", answer_group="x") == [1.0]
    assert regex([sample("x=5, x=4", "5")], pattern=r"x=(?P<x>\d)", answer_group="x") == [0.0]


def test_length_costs_the_distance_to_the_target_in_targets() -> None:
    samples = [sample("ab"), sample("abcd"), sample("abcdef")]  # 2, 4 and 6 tokens
    assert length(samples, target=4) == [-0.5, 0.0, -0.5]
    assert length(samples, target=2, penalty=0.5) == [0.0, -0.5, -1.0]
    assert length(samples, target=4, shorter_is_fine=True) == [0.0, 0.0, -0.5]


def test_reasoning_gym_scores_with_the_package_itself() -> None:
    from reasoning_gym.factory import create_dataset

    entry = create_dataset("chain_sum", size=1, seed=1)[0]
    problem = {"task": "chain_sum", "entry": entry}
    right, wrong = f"it is {entry['answer']}", f"it is {int(entry['answer']) + 1}"
    samples = [sample(text, reasoning_gym=problem) for text in (right, wrong, "no idea")]
    assert reasoning_gym(samples) == [1.0, 0.0, 0.0]
    tagged = [sample(f"<answer>{entry['answer']}</answer>", reasoning_gym=problem), samples[0]]
    assert reasoning_gym(tagged, extract="tag") == [1.0, 0.0]


def test_reasoning_gym_scores_with_the_options_that_the_problem_was_made_with() -> None:
    # The task accepts an error of one unit in the last of `max_num_decimal_places`: 0.1 here, 0.001 by default.
    problem = {"task": "decimal_arithmetic", "entry": {"answer": "1.5", "metadata": {}}}
    options = {"min_num_decimal_places": 1, "max_num_decimal_places": 1}
    near = sample("1.55", reasoning_gym={**problem, "options": options})
    assert reasoning_gym([near, sample("1.55", reasoning_gym=problem)]) == [1.0, 0.0]


def test_reasoning_gym_on_other_rows_is_an_error_that_says_what_to_use() -> None:
    with pytest.raises(ValueError, match="exact_match"):
        reasoning_gym([sample("5", "5")])


@pytest.mark.parametrize(("response", "gold"), [(r"\boxed{5}", r"\boxed{5}"), (r"\boxed{5}", "5"), ("5", r"\boxed{5}")])
def test_a_box_around_all_of_an_answer_never_makes_it_wrong(response: str, gold: str) -> None:
    assert exact_match([sample(response, gold)]) == [1.0]
    assert exact_match([sample(r"\boxed{6}", gold)]) == [0.0]


@pytest.mark.parametrize("gold", [[], "", " ", r"\boxed{}"])
def test_a_row_whose_answer_is_empty_is_an_error(gold: Any) -> None:
    with pytest.raises(ValueError, match="empty"):
        exact_match([sample("", gold)])


def test_an_empty_response_does_not_equal_an_answer_of_punctuation() -> None:
    assert exact_match([sample("", "?"), sample("?", "?")]) == [0.0, 1.0]
