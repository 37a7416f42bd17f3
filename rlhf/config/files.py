"""What a configuration points to on disk: that it exists, that the models fit, and absolute paths for the workers.

Relative paths are relative to the folder that the command is started in. They are made absolute here, once, before
any worker starts: workers have other working directories, and a path that means something else there would read the
wrong file or lose the run's output.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from rlhf.config.catalogue import needs_critic
from rlhf.config.checkpoints import CLASSIFIER, check_reward_checkpoint, compare_tokenizers
from rlhf.config.problems import Problem
from rlhf.config.rules_checkpoint import checkpoint_files, resolve_checkpoint_paths
from rlhf.config.rules_lora import adapters_find_their_layers
from rlhf.config.schema import Config, JsonlPrompts, PromptSource
from rlhf.config.suggest import nearest

_HUB_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$")
# Values of critic.model that stand for the checkpoint of another role.
_CRITIC_FROM = ("policy", "reward")
_QUICKSTART_MODEL = "smollm2-135m-instruct"
# Where Ray unpacks an uploaded working directory; it is deleted with the job.
_UPLOAD = "/runtime_resources/working_dir_files/"


def is_model_folder(path: str) -> bool:
    """Whether a model's path means a folder; otherwise it is a hub name, `organisation/name`."""
    if path.startswith((".", "/", "~")) or not _HUB_NAME.match(path):
        return True
    parent = path.split("/")[0]
    return parent == "models" or Path(parent).is_dir()


def resolve_paths(config: Config) -> Config:
    """The same configuration with every path absolute."""
    run = config.run.model_copy(update={"dir": _absolute(config.run.dir)})
    update: dict[str, Any] = {"run": run}
    update["model"] = config.model.model_copy(update={"path": _resolve_model(config.model.path)})
    if config.critic.model not in _CRITIC_FROM:
        update["critic"] = config.critic.model_copy(update={"model": _resolve_model(config.critic.model)})
    update["data"] = config.data.model_copy(update={"prompts": _resolve_prompts(config.data.prompts)})
    if config.evaluation is not None:
        prompts = _resolve_prompts(config.evaluation.prompts)
        update["evaluation"] = config.evaluation.model_copy(update={"prompts": prompts})
    functions = [f.model_copy(update={"name": _resolve_function(f.name)}) for f in config.reward.functions]
    model = config.reward.model
    if model is not None:
        model = model.model_copy(update={"path": _resolve_model(model.path)})
    update["reward"] = config.reward.model_copy(update={"functions": functions, "model": model})
    names = {"advantage": config.algorithm.advantage, "loss": config.algorithm.loss}
    resolved = {key: _resolve_function(name) for key, name in names.items()}
    update["algorithm"] = config.algorithm.model_copy(update=resolved)
    update["checkpoint"] = resolve_checkpoint_paths(config.checkpoint)
    return config.model_copy(update=update)


def check_files(config: Config) -> list[Problem]:
    """Everything that is missing or does not fit on disk."""
    found: list[Problem] = []
    for key, check in (
        ("run.dir", _run_folder),
        ("model.path", _policy),
        ("policy.lora", adapters_find_their_layers),
        ("reward.model.path", _reward_model),
        ("critic.model", _critic),
        ("data.prompts.path", _prompt_files),
        ("reward.functions", _function_files),
        ("checkpoint", checkpoint_files),
    ):
        try:
            found += check(config)
        except OSError as error:
            # A name that is too long, a folder that may not be searched: the file system's own word is the best.
            found.append(Problem(key, f"can't be looked at: {error.strerror} ({error.filename})"))
    return found


def _run_folder(config: Config) -> Iterator[Problem]:
    folder = _absolute(config.run.dir)
    if _UPLOAD in f"{folder}/":
        yield Problem(
            "run.dir",
            f"lies in the working directory that was uploaded with the job ({folder}), and Ray deletes that folder "
            "when the job ends, with everything the run leaves",
            str(config.run.dir),
            "Give an absolute path outside of it, on a disk that stays",
        )
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        reason = "is not writable" if existing.is_dir() else "is not a folder"
        yield Problem("run.dir", f"run folders can't be made here: {existing} {reason}", str(config.run.dir))


def _policy(config: Config) -> Iterator[Problem]:
    model = yield from _settings("model.path", config.model.path)
    if model is not None:
        yield from _heads(config, model)
        yield from _context(config, "model.path", model)
        yield from _stop_ids(config, model)


def _reward_model(config: Config) -> Iterator[Problem]:
    if config.reward.model is not None:
        yield from _scoring_model(config, "reward.model.path", config.reward.model.path)


def _critic(config: Config) -> Iterator[Problem]:
    if needs_critic(config) and config.critic.model not in _CRITIC_FROM:
        yield from _scoring_model(config, "critic.model", config.critic.model)


def _scoring_model(config: Config, key: str, path: str) -> Iterator[Problem]:
    """A model that reads the ids that the policy sampled: a reward model, or a critic, which may start from one."""
    model = yield from _settings(key, path)
    if model is None:
        return
    folder = str(_absolute(path))
    has_head = key == "reward.model.path" or any(str(name).endswith(CLASSIFIER) for name in model["architectures"])
    wrong = [check_reward_checkpoint(folder)] if has_head else []
    if is_model_folder(config.model.path):
        wrong.append(compare_tokenizers(folder, str(_absolute(config.model.path))))
    yield from (Problem(key, what, path) for what in wrong if what is not None)
    yield from _context(config, key, model)


def _settings(key: str, path: str) -> Generator[Problem, None, dict[str, Any] | None]:
    """What `config.json` of a model folder says; None, and what is wrong, where there is none. A hub name passes."""
    if not is_model_folder(path):
        return None
    folder = _absolute(path)
    file = folder / "config.json"
    if not file.is_file():
        what = f"{folder} has no config.json" if folder.is_dir() else f"no such folder: {folder}"
        near = nearest(path, _CRITIC_FROM) if key == "critic.model" else None
        if folder.name == _QUICKSTART_MODEL:
            hint = "Run `bash scripts/quickstart.sh`, or `python scripts/prepare_model.py`, to make it"
        elif near is not None:
            hint = f"Did you mean {near}?"
        else:
            hint = "A hub name is written organisation/name, such as Qwen/Qwen2.5-1.5B-Instruct"
        yield Problem(key, what, path, hint)
        return None
    try:
        model = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        yield Problem(key, f"{file} can't be read: {error}", path)
        return None
    text = model.get("text_config", model) if isinstance(model, dict) else None
    if not isinstance(text, dict):
        yield Problem(key, f"{file} is not an object of settings", path)
        return None
    return {**text, "architectures": model.get("architectures") or []}


def _heads(config: Config, model: dict[str, Any]) -> Iterator[Problem]:
    size = config.rollout.tensor_parallel
    heads = model.get("num_attention_heads")
    kv_heads = model.get("num_key_value_heads", heads)
    if not isinstance(heads, int) or not isinstance(kv_heads, int):
        return
    # KV heads may also be fewer than devices, then each is kept on several.
    if heads % size or (kv_heads % size and size % kv_heads):
        possible = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        yield Problem(
            "rollout.tensor_parallel",
            f"the model has {heads} attention heads and {kv_heads} KV heads, which can't be split over {size} devices",
            size,
            f"Possible: {', '.join(map(str, possible))}",
        )


def _context(config: Config, key: str, model: dict[str, Any]) -> Iterator[Problem]:
    limit = model.get("max_position_embeddings")
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if isinstance(limit, int) and longest > limit:
        yield Problem(
            "rollout.max_new_tokens",
            f"data.max_prompt_tokens {config.data.max_prompt_tokens} + rollout.max_new_tokens "
            f"{config.rollout.max_new_tokens} = {longest} tokens, and the model of {key} was made for at most {limit}",
            config.rollout.max_new_tokens,
            "Lower one of them",
        )


def _stop_ids(config: Config, model: dict[str, Any]) -> Iterator[Problem]:
    vocabulary = model.get("vocab_size")
    for index, token_id in enumerate(config.rollout.sampling.stop_token_ids):
        if isinstance(vocabulary, int) and token_id >= vocabulary:
            yield Problem(
                f"rollout.sampling.stop_token_ids.{index}",
                f"the model's vocabulary has {vocabulary} ids, 0 to {vocabulary - 1}",
                token_id,
                "Leave it out, or give the id of a token of this model",
            )


def _prompt_files(config: Config) -> Iterator[Problem]:
    for section in ("data", "evaluation"):
        prompts = getattr(getattr(config, section), "prompts", None)
        if isinstance(prompts, JsonlPrompts):
            path = _absolute(prompts.path)
            if not path.is_file():
                yield Problem(f"{section}.prompts.path", _missing(path), str(prompts.path), _near(path))


def _function_files(config: Config) -> Iterator[Problem]:
    named = {f"reward.functions.{index}.name": f.name for index, f in enumerate(config.reward.functions)}
    named |= {"algorithm.advantage": config.algorithm.advantage, "algorithm.loss": config.algorithm.loss}
    for key, name in named.items():
        file = _function_file(name)
        if file is not None and not _absolute(file).is_file():
            yield Problem(key, _missing(_absolute(file)), name, _near(_absolute(file)))


def _missing(path: Path) -> str:
    return f"not a file: {path}" if path.exists() else f"no such file: {path}"


def _near(path: Path) -> str:
    names = [p.name for p in path.parent.iterdir() if p.suffix == path.suffix] if path.parent.is_dir() else []
    near = nearest(path.name, names)
    return f"Did you mean {path.with_name(near)}?" if near else ""


def _function_file(name: str) -> str | None:
    """The file of a function that is named `path/to/file.py:function`."""
    file, colon, _ = name.rpartition(":")
    return file if colon and file.endswith(".py") else None


def _resolve_function(name: str) -> str:
    file = _function_file(name)
    return name if file is None else f"{_absolute(file)}:{name.rpartition(':')[2]}"


def _resolve_model(path: str) -> str:
    return str(_absolute(path)) if is_model_folder(path) else path


def _resolve_prompts(prompts: PromptSource) -> PromptSource:
    if isinstance(prompts, JsonlPrompts):
        return prompts.model_copy(update={"path": _absolute(prompts.path)})
    return prompts


def _absolute(path: str | Path) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))
