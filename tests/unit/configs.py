"""A small valid configuration with changes, and what is said when it is refused."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf.config import Config, ConfigError, config_from_dict


def build(changes: dict[str, Any], *, check_files: bool = False) -> Config:
    """The configuration with `section.key` replaced; raises `ConfigError`."""
    data: dict[str, Any] = {
        "data": {"prompts": {"source": "reasoning_gym", "task": "chain_sum"}},
        "reward": {"functions": [{"name": "reasoning_gym"}]},
    }
    for path, value in changes.items():
        *above, last = path.split(".")
        here = data
        for part in above:
            here = here.setdefault(part, {})
        here[last] = value
    return config_from_dict(data, check_files=check_files)


def refusals(changes: dict[str, Any], *, check_files: bool = False) -> dict[str, str]:
    """Rule and remedy of every key that is refused."""
    with pytest.raises(ConfigError) as caught:
        build(changes, check_files=check_files)
    return {problem.key: f"{problem.rule}. {problem.hint}" for problem in caught.value.problems}
