"""docs/configuration.md says what the schema says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from rlhf.config import Config, keys, rules

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "generate_config_docs.py"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_config_docs", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_documentation_of_the_configuration_is_current(generator: ModuleType) -> None:
    assert generator.main(["--check"]) == 0, "run: python scripts/generate_config_docs.py"


def test_a_stale_file_is_noticed(generator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "TARGET", tmp_path / "configuration.md")
    assert generator.main(["--check"]) == 1
    assert generator.main([]) == 0
    assert generator.main(["--check"]) == 0


def test_every_key_is_documented(generator: ModuleType) -> None:
    text = generator.render()
    missing = [".".join(key) for key in keys.valid_keys() if f"`{'.'.join(key).replace('.0.', '.N.')}`" not in text]
    assert missing == []


def test_every_key_and_rule_says_what_it_means() -> None:
    silent = [
        ".".join(key)
        for key in keys.valid_keys()
        if (field := keys.field_at([int(p) if p.isdigit() else p for p in key])) is not None
        and not field.description
        and not keys.members(field.annotation)
    ]
    assert silent == []
    assert all(rule.__doc__ for rule in rules.RULES)
    assert Config.__doc__
