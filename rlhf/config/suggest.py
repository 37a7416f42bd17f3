"""The nearest valid name for one that isn't: a typing error, a key in the wrong section, another framework's word."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches

# What other frameworks call the same thing, where the spelling alone would not lead there.
_OTHER_WORDS = {
    "actor": "policy",
    "ref": "reference",
    "lr": "learning_rate",
    "n": "samples_per_prompt",
    "group_size": "samples_per_prompt",
    "num_generations": "samples_per_prompt",
    "max_tokens": "max_new_tokens",
    "max_steps": "steps",
}
_SIMILAR_ENOUGH = 0.65
_ABBREVIATED = 0.8
_SAME_SECTION = 0.25
_SAME_TOP = 0.1


def nearest(name: object, valid: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The valid name that `name` is probably meant to be, or None; at `cutoff` 1 only the same one."""
    found = get_close_matches(str(name), list(valid), n=1, cutoff=cutoff)
    return found[0] if found else None


def nearest_key(key: tuple[str, ...], valid: Iterable[tuple[str, ...]]) -> tuple[str, ...] | None:
    """The valid key path that `key` is probably meant to be, or None.

    The last name is compared with every tail of a valid path, so that `algorithm.kl_coeff` finds
    `algorithm.kl.coefficient`; a key of the same section beats an equally similar one elsewhere.
    """
    *section, name = (_OTHER_WORDS.get(part, part) for part in key)
    best: tuple[float, int] = (0.0, 0)
    found = None
    for candidate in valid:
        tails = ["_".join(candidate[start:]) for start in range(len(candidate))]
        similarity = max(SequenceMatcher(None, name, tail).ratio() for tail in tails)
        if len(name) >= 3 and candidate[-1].startswith(name):
            similarity = max(similarity, _ABBREVIATED)
        if similarity < _SIMILAR_ENOUGH:
            continue
        if list(candidate[:-1]) == section:
            similarity += _SAME_SECTION
        elif section and candidate[0] == section[0]:
            similarity += _SAME_TOP
        score = (similarity, -len(candidate))
        if score > best:
            best, found = score, candidate
    return found
