"""Advantage estimators and losses of the user's own: registering, finding, and every mistake with its remedy."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf.algorithms import registry
from rlhf.algorithms.registry import (
    OwnFunctionError,
    UnknownFunction,
    dump_own,
    find_advantage,
    find_policy_loss,
    load_own,
    own_advantage,
    own_policy_loss,
    register_advantage,
    register_policy_loss,
    resolve_function,
)
from rlhf.config.catalogue import OWN_ADVANTAGES, OWN_LOSSES, AdvantageSpec, LossSpec, advantage_spec, loss_spec


@pytest.fixture(autouse=True)
def nothing_registered() -> Iterator[None]:
    """Each test starts with an empty registry and leaves it as it was."""
    kept: list[dict[str, Any]] = [
        OWN_ADVANTAGES,
        OWN_LOSSES,
        registry._ADVANTAGES.functions,
        registry._LOSSES.functions,
    ]
    before = [dict(one) for one in kept]
    for one in kept:
        one.clear()
    yield
    for one, content in zip(kept, before, strict=True):
        one.clear()
        one.update(content)


def centred(batch: Any, config: Any) -> Any:
    return batch.rewards_S - batch.rewards_S.mean()


class TestRegistering:
    def test_advantage_is_found_by_its_name_and_described_in_the_catalogue(self) -> None:
        decorator = register_advantage("mine", min_group_size=4, level="token", needs_critic=True, needs_greedy=True)
        assert decorator(centred) is centred
        assert own_advantage("mine") is find_advantage("mine") is centred
        assert advantage_spec("mine") == AdvantageSpec("mine", 4, "token", True, True, frozenset())

    def test_advantage_is_of_whole_responses_and_needs_nothing_unless_it_says_so(self) -> None:
        register_advantage("mine")(centred)
        assert OWN_ADVANTAGES["mine"] == AdvantageSpec("mine", 1, "sequence", False, False)

    @pytest.mark.parametrize("uses_ratio", [True, False])
    def test_loss_is_found_by_its_name_and_described_in_the_catalogue(self, uses_ratio: bool) -> None:
        assert register_policy_loss("mine", uses_ratio=uses_ratio)(centred) is centred
        assert own_policy_loss("mine") is find_policy_loss("mine") is centred
        assert loss_spec("mine") == LossSpec("mine", uses_ratio)

    def test_loss_has_a_ratio_unless_it_says_so(self) -> None:
        register_policy_loss("mine")(centred)
        assert OWN_LOSSES["mine"] == LossSpec("mine", True)

    def test_advantages_and_losses_have_names_of_their_own(self) -> None:
        register_advantage("mine")(centred)
        assert own_policy_loss("mine") is None and OWN_LOSSES == {}
        register_policy_loss("grpo")(centred)  # a built-in advantage, and no built-in loss
        assert own_policy_loss("grpo") is centred and own_advantage("grpo") is None

    def test_built_in_names_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"advantage estimator 'grpo' is built in: .* than gae, grpo, dr_grpo"):
            register_advantage("grpo")(centred)
        with pytest.raises(ValueError, match=r"policy loss 'ppo' is built in: choose another name than ppo"):
            register_policy_loss("ppo")(centred)
        assert OWN_ADVANTAGES == {} and OWN_LOSSES == {}

    def test_second_function_of_the_same_name_is_refused_and_the_first_stays(self) -> None:
        @register_advantage("mine", min_group_size=2)
        def first(batch: Any, config: Any) -> Any:
            return batch.rewards_S

        with pytest.raises(
            ValueError, match=r"'mine' is registered already, as (.*)first: (.*)centred needs another"
        ) as refused:
            register_advantage("mine")(centred)
        assert f"as {__name__}.{first.__qualname__}: {__name__}.centred needs" in str(refused.value)
        assert own_advantage("mine") is first
        assert advantage_spec("mine").min_group_size == 2

    def test_same_function_may_be_registered_again(self) -> None:
        register_policy_loss("mine")(centred)
        register_policy_loss("mine", uses_ratio=False)(centred)
        assert loss_spec("mine") == LossSpec("mine", False)

    def test_file_that_is_imported_twice_may_register_twice(self, tmp_path: Path) -> None:
        # As a module and as a script, or for a reward function and for an advantage.
        source = (
            "from rlhf.algorithms.registry import register_advantage\n@register_advantage('mine')\ndef f(b, c): ..."
        )
        (tmp_path / "twice.py").write_text(source)
        first = resolve_function("twice.py:f", tmp_path)
        namespace: dict[str, Any] = {"__name__": "again"}
        exec(compile(source, str(tmp_path / "twice.py"), "exec"), namespace)
        assert own_advantage("mine") is namespace["f"] is not first

    def test_callable_objects_are_told_apart(self) -> None:
        class Scaled:
            def __call__(self, batch: Any, config: Any) -> Any:
                return batch.rewards_S

        one = Scaled()
        register_advantage("mine")(one)
        register_advantage("mine")(one)
        with pytest.raises(ValueError, match=r"registered already, as .*Scaled"):
            register_advantage("mine")(Scaled())

    def test_function_without_a_module_is_told_all_the_same(self) -> None:
        register_advantage("mine")(str.upper)
        with pytest.raises(ValueError, match=r"registered already, as \?\.str\.upper: \?\.str\.lower needs another"):
            register_advantage("mine")(str.lower)

    @pytest.mark.parametrize("name", ["", "my_module:mine"])
    def test_names_that_mean_something_else_are_refused(self, name: str) -> None:
        with pytest.raises(ValueError, match="at least one character and no colon"):
            register_advantage(name)(centred)

    def test_impossible_group_size_is_refused(self) -> None:
        with pytest.raises(ValueError, match="min_group_size 0: a group has at least 1 sample"):
            register_advantage("mine", min_group_size=0)

    def test_unknown_level_is_refused(self) -> None:
        with pytest.raises(ValueError, match="level 'tokens': use 'sequence' or 'token'"):
            register_advantage("mine", level="tokens")  # type: ignore[arg-type]


class TestFinding:
    def test_unknown_name_is_answered_with_the_nearest_one(self) -> None:
        register_advantage("my_own")(centred)
        with pytest.raises(UnknownFunction, match=r"no advantage estimator 'my_onw' \(did you mean 'my_own'\?\)"):
            find_advantage("my_onw")
        with pytest.raises(
            UnknownFunction,
            match=r"no policy loss 'cisop' \(did you mean 'cispo'\?\);.*, `module:function` or `.*`$",
        ):
            find_policy_loss("cisop")

    def test_function_of_a_file_is_found_without_registering(self, tmp_path: Path) -> None:
        (tmp_path / "mine.py").write_text("def f(batch, config):\n    return 7\n")
        assert find_advantage(f"{tmp_path}/mine.py:f")(None, None) == 7
        # Nothing is said of it, so it asks for nothing.
        assert {name: AdvantageSpec(name, level="token") for name in (f"{tmp_path}/mine.py:f",)} == OWN_ADVANTAGES

    def test_what_a_function_registered_holds_for_its_long_name_too(self, tmp_path: Path) -> None:
        (tmp_path / "mine.py").write_text(
            "from rlhf.algorithms.registry import register_advantage\n"
            "@register_advantage('mine', min_group_size=3)\n"
            "def f(batch, config): ...\n"
            "def g(batch, config): ...\n"
        )
        name = f"{tmp_path}/mine.py:f"
        assert find_advantage(name) is own_advantage("mine")
        assert advantage_spec(name) == AdvantageSpec(name, min_group_size=3)
        find_advantage(f"{tmp_path}/mine.py:g")
        assert advantage_spec(f"{tmp_path}/mine.py:g").min_group_size == 1


class TestTravelling:
    def arrive(self, dumped: dict[str, bytes]) -> dict[str, Any]:
        """Unpack as in another process, where nothing is registered."""
        for known in (OWN_ADVANTAGES, OWN_LOSSES):
            known.clear()
        return {key: load_own(packed) for key, packed in dumped.items()}

    def test_what_is_built_in_does_not_travel(self) -> None:
        assert dump_own("grpo", "ppo") == {}

    def test_advantage_arrives_with_what_it_asks_for(self) -> None:
        register_advantage("mine", min_group_size=4, needs_greedy=True)(lambda batch, config: 7)
        arrived = self.arrive(dump_own("mine", "ppo"))
        assert set(arrived) == {"advantage"} and arrived["advantage"](None, None) == 7
        assert advantage_spec("mine") == AdvantageSpec("mine", 4, needs_greedy=True) and OWN_LOSSES == {}

    def test_loss_arrives_with_what_it_asks_for(self) -> None:
        register_policy_loss("mine", uses_ratio=False)(lambda inputs, config: 8)
        arrived = self.arrive(dump_own("grpo", "mine"))
        assert set(arrived) == {"loss"} and arrived["loss"](None, None) == 8
        assert loss_spec("mine") == LossSpec("mine", False) and OWN_ADVANTAGES == {}

    def test_function_of_a_file_arrives_where_there_is_no_such_file(self, tmp_path: Path) -> None:
        (tmp_path / "gone.py").write_text("SHIFT = 2\ndef f(batch, config):\n    return SHIFT\n")
        dumped = dump_own(f"{tmp_path}/gone.py:f", "ppo")
        (tmp_path / "gone.py").unlink()
        assert self.arrive(dumped)["advantage"](None, None) == 2

    def test_unknown_name_is_told_with_its_setting(self) -> None:
        with pytest.raises(OwnFunctionError, match=r"^algorithm\.loss: there is no policy loss 'mine'"):
            dump_own("grpo", "mine")

    def test_function_that_can_not_be_packed_is_told_with_the_remedy(self) -> None:
        lock = threading.Lock()
        register_advantage("mine")(lambda batch, config: lock)
        expected = r"^algorithm\.advantage: 'mine' can't be sent to the learner: TypeError.*lock.* inside it$"
        with pytest.raises(OwnFunctionError, match=expected):
            dump_own("mine", "ppo")


class TestResolving:
    def test_function_of_a_module(self) -> None:
        import math

        assert resolve_function("math:sqrt") is math.sqrt

    def test_files_of_the_same_name_do_not_replace_each_other(self, tmp_path: Path) -> None:
        for folder, value in (("a", 1), ("b", 2)):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "mine.py").write_text(f"def f():\n    return {value}\n")
        first, second = (resolve_function("mine.py:f", tmp_path / folder) for folder in "ab")
        assert (first(), second()) == (1, 2)
        assert resolve_function("a/mine.py:f", tmp_path) is first

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("sqrt", "'sqrt' names no function: write `module:function`"),
            ("math:", "'math:' names no function"),
            (":sqrt", "':sqrt' names no function"),
            ("no_such_module_xyz:f", "importing module 'no_such_module_xyz' failed: ModuleNotFoundError"),
            ("math:sqroot", r"math has no function 'sqroot' \(did you mean 'sqrt'\?\)"),
            ("math:pi", "'pi' in math is a float, not a function"),
            ("no_such.py:f", "there is no file .*no_such.py; relative names start at"),
        ],
    )
    def test_mistake_is_explained(self, name: str, expected: str, tmp_path: Path) -> None:
        with pytest.raises(UnknownFunction, match=expected):
            resolve_function(name, tmp_path)

    @pytest.mark.parametrize(
        ("source", "expected"),
        [
            ("x = 1\nx.missing\n", r"AttributeError.*\(.*broken.py, line 2\)"),
            ("raise SystemExit(3)\n", r"SystemExit: 3 \(.*broken.py, line 1\)"),
            ("def f(:\n", r"SyntaxError: .*broken.py, line 1"),
        ],
    )
    def test_error_in_the_users_file_is_told_with_its_place(self, source: str, expected: str, tmp_path: Path) -> None:
        (tmp_path / "broken.py").write_text(source)
        for _ in range(2):  # and again: a half-imported module is not kept
            with pytest.raises(UnknownFunction, match=f"importing .* failed: {expected}"):
                resolve_function("broken.py:f", tmp_path)

    def test_ctrl_c_while_importing_is_not_taken_for_a_mistake(self, tmp_path: Path) -> None:
        (tmp_path / "slow.py").write_text("raise KeyboardInterrupt\n")
        with pytest.raises(KeyboardInterrupt):
            resolve_function("slow.py:f", tmp_path)


def test_registering_imports_nothing_heavy() -> None:
    code = "import sys, rlhf.algorithms.registry; print({'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"
