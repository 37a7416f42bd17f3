"""Secrets appear neither in a dumped configuration nor in an error message."""

from __future__ import annotations

import pytest

from rlhf.config import ConfigError, config_from_dict, dump_config
from rlhf.config.redaction import REDACTED, redact


@pytest.mark.parametrize(
    "key", ["api_key", "apikey", "apiKey", "KEY", "auth-token", "access_token", "secret", "db.password", "api_keys"]
)
def test_texts_under_keys_that_name_a_secret_are_redacted(key: str) -> None:
    assert redact({key: "s3cret"}) == {key: REDACTED}
    assert redact({"inner": [{key: ["s3cret"]}]}) == {"inner": [{key: [REDACTED]}]}


@pytest.mark.parametrize("options", [{"max_tokens": 5}, {"tokenizer": "x"}, {"monkey": "x"}, {"token": 3}, {"key": ""}])
def test_what_is_no_secret_is_kept(options: dict[str, object]) -> None:
    assert redact(options) == options


def test_credentials_in_addresses_are_redacted_and_the_rest_is_kept() -> None:
    assert redact("https://me:pw@host:1/x") == f"https://{REDACTED}@host:1/x"
    assert redact("https://tok@host/x") == f"https://{REDACTED}@host/x"
    assert redact("https://host/x?api_key=abc&n=1") == f"https://host/x?api_key={REDACTED}&n=1"
    assert redact("https://host/a@b") == "https://host/a@b"


def test_a_dump_has_no_secret() -> None:
    options = {"url": "https://me:hunter2@host", "api_key": "hunter2", "headers": {"Authorization": "hunter2"}}
    config = config_from_dict(
        {
            "data": {"prompts": {"source": "reasoning_gym", "task": "chain_sum"}},
            "reward": {"functions": [{"name": "my.module:score", "options": options}]},
        },
        check_files=False,
    )
    assert "hunter2" not in dump_config(config)
    assert dump_config(config).count(REDACTED) == 3


def test_an_error_message_has_no_secret() -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_dict({"tracking": {"wandb": {"api_key": "hunter2"}}}, check_files=False)
    assert "tracking.wandb.api_key" in str(caught.value)
    assert "hunter2" not in str(caught.value)
