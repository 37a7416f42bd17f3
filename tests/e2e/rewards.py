"""A reward that differs between the samples of a random model, so that there is always something to learn from."""


def digits(samples):
    """Share of the response's characters that are digits."""
    return [sum(c.isdigit() for c in s.response) / max(1, len(s.response)) for s in samples]
