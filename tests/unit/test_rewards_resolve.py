"""Names become functions, and every mistake in `reward.functions` is found before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.schema import RewardFunctionConfig
from rlhf.rewards import RewardError, RewardInput, check_functions, dump_functions, function_keys, resolve


def problems(name: str, base_dir: Path | None = None, **options: Any) -> list[str]:
    return check_functions([RewardFunctionConfig(name=name, options=options)], base_dir=base_dir)


def test_built_ins_with_good_options_have_no_problem() -> None:
    functions = [
        RewardFunctionConfig(name="reasoning_gym", options={"extract": "last_number"}),
        RewardFunctionConfig(name="exact_match", options={"extract": "boxed", "answer_extract": "hashes"}),
        RewardFunctionConfig(name="regex", options={"pattern": "a(b)", "answer_group": 1}),
        RewardFunctionConfig(name="length", options={"target": 10, "penalty": 1}),
    ]
    assert check_functions(functions) == []


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("exact_mach", {}, ["reward.functions.0.name: 'exact_mach'", "did you mean 'exact_match'?"]),
        ("zzz", {}, ["not a reward function", "reasoning_gym, exact_match, regex, length", "module:function"]),
        ("exact_match", {"extrct": "tag"}, ["reward.functions.0.options.extrct", "did you mean 'extract'?"]),
        ("exact_match", {"extract": "boxd"}, ["options.extract: 'boxd'", "'boxed'", "did you mean 'boxed'?"]),
        ("reasoning_gym", {"extract": "boxed"}, ["'boxed'", "is not one of 'last_number', 'tag', 'whole'"]),
        ("regex", {}, ["needs the option 'pattern'", "set reward.functions.0.options.pattern"]),
        ("regex", {"pattern": "("}, ["pattern '('", "not a regular expression"]),
        ("regex", {"pattern": "a", "answer_group": 1}, ["answer_group 1", "not a group"]),
        ("length", {"target": "ten"}, ["options.target: 'ten'", "int"]),
        ("length", {"target": 0}, ["target 0", "at least 1"]),
        ("no_such_module_xyz:f", {}, ["importing module 'no_such_module_xyz' failed", "ModuleNotFoundError"]),
        ("math:sqroot", {}, ["math has no function 'sqroot'", "did you mean 'sqrt'?"]),
        ("math:pi", {}, ["'pi' in math is a float, not a function"]),
        ("no_such.py:f", {}, ["there is no file", "no_such.py"]),
    ],
)
def test_mistake_is_refused_with_place_value_and_remedy(
    name: str, options: dict[str, Any], expected: list[str]
) -> None:
    (problem,) = problems(name, **options)
    for part in expected:
        assert part in problem


def test_all_mistakes_are_reported_at_once() -> None:
    functions = [
        RewardFunctionConfig(name="lenght"),
        RewardFunctionConfig(name="length", options={"target": 4}),
        RewardFunctionConfig(name="regex", options={"patern": "a"}),
    ]
    found = check_functions(functions)
    assert [problem.split(":")[0] for problem in found] == [
        "reward.functions.0.name",
        "reward.functions.2.options.patern",
        "reward.functions.2.options",
    ]


def test_function_of_a_file_is_found_relative_to_the_base_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(samples, bonus: float = 0.0):\n    return [bonus for s in samples]\n")
    function = resolve("mine.py:f", tmp_path)
    assert function([RewardInput(prompt="", response="")], bonus=2.0) == [2.0]
    assert problems("mine.py:f", tmp_path, bonus=1) == []
    (problem,) = problems("mine.py:f", tmp_path, bonus="much")
    assert "options.bonus: 'much' doesn't fit float" in problem


def test_files_of_the_same_name_do_not_replace_each_other(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"def f(samples):\n    return {folder!r}\n")
    assert resolve("a/mine.py:f", tmp_path)([]) == "a"
    assert resolve("b/mine.py:f", tmp_path)([]) == "b"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import this_is_not_installed", "ModuleNotFoundError: No module named 'this_is_not_installed'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("def f(:", "SyntaxError"),
        ("\n\nx = 1 / 0", "line 3"),
        ("async def f(samples): ...", "drop the `async`"),
        ("def f(): ...", "takes no samples"),
        ("def ff(samples): ...", "has no function 'f' (did you mean 'ff'?)"),
    ],
)
def test_problem_of_a_users_file_shows_its_own_error(tmp_path: Path, source: str, expected: str) -> None:
    (tmp_path / "mine.py").write_text(source)
    (problem,) = problems("mine.py:f", tmp_path)
    assert problem.startswith("reward.functions.0.name: 'mine.py:f'")
    assert expected in problem


def test_functions_from_python_are_named_in_the_configuration_or_added() -> None:
    def brevity(samples: list[RewardInput], unit: float = 1.0) -> list[float]:
        return [-unit * len(sample.response) for sample in samples]

    functions = [RewardFunctionConfig(name="brevity", options={"unit": 2.0}, weight=0.5)]
    assert check_functions(functions, {"brevity": brevity}) == []
    (problem,) = check_functions(functions[:0], {"brevity": brevity, "other": lambda: []})
    assert problem.startswith("reward.functions.1.name: 'other' takes no samples")


def test_functions_of_the_same_name_get_distinct_keys() -> None:
    assert function_keys(["regex", "length", "regex", "regex"]) == ["regex", "length", "regex#2", "regex#3"]


def test_functions_of_files_are_reported_without_their_folder() -> None:
    assert function_keys(["/a/mine.py:f", "b/mine.py:f", "my.module:f"]) == ["mine.py:f", "mine.py:f#2", "my.module:f"]


def test_function_that_cannot_travel_is_refused_with_its_name() -> None:
    lock = __import__("threading").Lock()
    with pytest.raises(RewardError, match="reward function 'guarded' can't be sent to its worker process"):
        dump_functions({"guarded": lambda samples: [bool(lock)]})


def test_worker_module_imports_nothing_heavy() -> None:
    code = (
        "import sys, rlhf.rewards.worker\n"
        "print([m for m in ('numpy', 'pydantic', 'torch', 'ray', 'vllm', 'reasoning_gym') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
