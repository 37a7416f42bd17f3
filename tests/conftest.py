"""Settings and fixtures that every test shares.

Environment variables are set here, at import, because Ray actors and engine child processes inherit what is set
before they start and nothing that is set later.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.tiny import make_tiny_model

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "DS_ACCELERATOR": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "WANDB_SILENT": "true",
}
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background by a shell: the commands under test would inherit that they ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

SUITES = ("unit", "integration", "e2e")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the cheap suites first: unit, then integration, then e2e; the order within each stays as collected."""
    items.sort(key=lambda item: _suite(item.path))


def _suite(path: Path) -> int:
    return next((index for index, name in enumerate(SUITES) if name in path.parts), len(SUITES))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Count a test that is skipped without a reason as failed."""
    report = yield
    _refuse_unexplained_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for whole modules; a module skipped because an import failed has no reason that holds."""
    report = yield
    _refuse_unexplained_skip(report)
    return report


def _refuse_unexplained_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not report.skipped or hasattr(report, "wasxfail") or not isinstance(report.longrepr, tuple):
        return
    reason = report.longrepr[2].removeprefix("Skipped").removeprefix(": ").strip()
    # "unconditional skip" is what pytest writes where no reason was given.
    if reason in ("", "unconditional skip") or reason.startswith("could not import"):
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid} is skipped without a reason that holds ({reason or 'none given'})"


@pytest.fixture(scope="session")
def tiny_untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny model whose output head is a tensor of its own; its tokenizer has no chat template."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "untied", tied=False)


@pytest.fixture(scope="session")
def tiny_tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny model whose output head is its embedding; its tokenizer has no chat template."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "tied", tied=True)
