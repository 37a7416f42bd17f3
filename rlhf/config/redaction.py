"""Secrets stay out of what is written down: run folders, logs and error messages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

REDACTED = "<redacted>"

# Whole words at the end of a key, so that `max_tokens: 5` and `tokenizer` are not taken for secrets; the value has to
# be text as well.
_SECRET_KEY = re.compile(
    r"(?:^|[_.\- ]|api|access|auth|secret|private)"
    r"(?:key|token|secret|password|passwd|passphrase|credential|authorization|bearer)s?$",
    re.IGNORECASE,
)
_URL_CREDENTIALS = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.\-]*://)[^/\s@]+@")
_URL_PARAMETER = re.compile(r"(?P<name>[?&][^=&\s]*(?:key|token|secret|password)=)[^&\s]+", re.IGNORECASE)


def redact(value: Any, *, key: str = "") -> Any:
    """The value with secrets replaced: texts under a key that names a secret, and credentials in URLs.

    Mappings and lists are copied with their contents redacted; paths become text.
    """
    secret = bool(_SECRET_KEY.search(key))
    if isinstance(value, Mapping):
        return {k: redact(v, key=key if secret else str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item, key=key) for item in value]
    if isinstance(value, PurePath):
        value = str(value)
    if not isinstance(value, str):
        return value
    if secret and value:
        return REDACTED
    value = _URL_CREDENTIALS.sub(rf"\g<scheme>{REDACTED}@", value)
    return _URL_PARAMETER.sub(rf"\g<name>{REDACTED}", value)
