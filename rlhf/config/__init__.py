"""The typed configuration of a run and its loader. Imports no torch, ray, vllm or transformers."""

from rlhf.config.loader import config_from_dict, dump_config, load_config
from rlhf.config.problems import ConfigError, Problem
from rlhf.config.schema import Config

__all__ = ["Config", "ConfigError", "Problem", "config_from_dict", "dump_config", "load_config"]
