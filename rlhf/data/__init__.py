"""Prompts and the order they are drawn in."""

from rlhf.data.errors import DataError
from rlhf.data.prompts import LoadedPrompts, load_prompts
from rlhf.data.render import load_tokenizer
from rlhf.data.sampler import PromptSampler

__all__ = ["DataError", "LoadedPrompts", "PromptSampler", "load_prompts", "load_tokenizer"]
