"""`python -m rlhf.train`: parse the command line, check everything, hand over to the trainer, set the exit code.

Nothing heavy is imported before the configuration is valid, so a mistake is reported in a fraction of a second.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Literal

from rlhf.config import Config, ConfigError, Problem, dump_config, load_config

if TYPE_CHECKING:
    from rlhf.cluster.needs import Needs

DONE, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130

_DESCRIPTION = """\
Train a language model with reinforcement learning: one YAML file describes the run.
"""

_EPILOG = """\
examples:
  python -m rlhf.train --config configs/quickstart.yaml
  python -m rlhf.train --config ppo.yaml policy.learning_rate=2e-6 run.name=try2
  python -m rlhf.train --config ppo.yaml 'rollout.sampling.stop=["\\n"]' reward.functions.0.weight=2
  python -m rlhf.train --config ppo.yaml --dry-run

overrides:
  section.key=value, the value written as in YAML; the items of a list are 0, 1, 2, ...
  The last of two overrides of the same key wins.

sections:
{sections}

exit codes:
  0  done
  1  failed while running
  2  refused before anything started; all errors are listed
  130  interrupted

Every key, its default and its rules: docs/configuration.md. When something goes wrong: docs/troubleshooting.md.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = _parse(argv)
    try:
        config = load_config(arguments.config, arguments.overrides)
        _check_functions(config, arguments.config)
        return _dry_run(config) if arguments.dry_run else _train(config)
    except ConfigError as error:
        return _say(str(error), REFUSED)
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    sections = "\n".join(
        f"  {name:<12}{_first_line(field.annotation.__doc__ if name != 'evaluation' else field.description)}"
        for name, field in Config.model_fields.items()
        if name != "task"
    )
    parser = argparse.ArgumentParser(
        prog="python -m rlhf.train",
        description=_DESCRIPTION,
        epilog=_EPILOG.format(sections=sections),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", required=True, help="the run's YAML file")
    parser.add_argument(
        "--dry-run", action="store_true", help="show the resolved configuration and the placement, and start nothing"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that replace the file's")
    arguments, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        dashed = next((u for u in unknown if u.startswith("--") and "." in u), None)
        hint = f"; settings are written without dashes: {dashed.lstrip('-').partition('=')[0]}=value" if dashed else ""
        parser.error(f"unknown argument {unknown[0]}{hint}")
    return arguments


def _first_line(text: str | None) -> str:
    return (text or "").strip().splitlines()[0]


def _check_functions(config: Config, file: str) -> None:
    """Check the functions of the user's own, which means importing their modules, and what these ask of the run."""
    from rlhf.algorithms.registry import OwnFunctionError, find_own
    from rlhf.config import rules
    from rlhf.rewards import check_functions

    problems = check_functions(config.reward.functions)
    try:
        find_own(config.algorithm.advantage, config.algorithm.loss)
    except OwnFunctionError as error:
        problems.append(str(error))
    if problems:
        raise ConfigError(Problem("", problem, place=file) for problem in problems)
    asked = rules.check(config)
    if asked:
        raise ConfigError(asked)


def _dry_run(config: Config) -> int:
    """Print the resolved configuration and the placement table, and say what this machine would refuse."""
    from rlhf.cluster.model_shape import ModelShapes, UnknownShape
    from rlhf.cluster.needs import needs
    from rlhf.cluster.needs_table import render_table
    from rlhf.cluster.preflight import Refused, local_resources, preflight, resolve_device
    from rlhf.config.threads import render_threads, usable_cores

    try:
        shapes = ModelShapes.of(config)
    except UnknownShape as error:
        return _say(f"configuration refused: {error}", REFUSED)

    def required(device: Literal["cpu", "cuda"]) -> Needs:
        return needs(config, shapes.policy, device, shapes.critic, shapes.reward)

    resources = local_resources()
    refusal = ""
    try:
        device = resolve_device(config.placement.device, resources)
        preflight(required(device), resources, config.rollout.gpu_memory_utilization)
    except Refused as error:
        # Elsewhere it may fit: a dry run on a laptop can be for a cluster.
        device, refusal = "cuda" if config.placement.device == "cuda" else "cpu", str(error)
    whole = required(device)
    sys.stdout.write(f"{dump_config(config)}\n{render_table(whole, str(resources))}\n")
    if device == "cpu":
        cores = usable_cores()
        sys.stdout.write(f"{render_threads(config, cores, [pool.pool for pool in whole.pools])}\n")
    if refusal:
        sys.stdout.write(f"\nOn this machine alone the run would be refused:\n{refusal}\n")
    return REFUSED if whole.problems else DONE


def _train(config: Config) -> int:
    """Train, and turn whatever happens into an exit code and words."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _fit(config)
    except SystemExit as stop:
        # Ray replaces the handler of SIGTERM by one that exits with the signal's number.
        if stop.code == signal.SIGTERM:
            return _say("interrupted", INTERRUPTED)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _fit(config: Config) -> int:
    from rlhf.cluster.model_shape import UnknownShape
    from rlhf.cluster.preflight import Refused
    from rlhf.data import DataError
    from rlhf.trainers.ppo import PPOTrainer

    try:
        PPOTrainer(config).fit()
    except (Refused, ConfigError, DataError, UnknownShape) as error:
        return _say(f"refused: {error}", REFUSED)
    except Exception as error:
        # Our own errors are written for users and carry the traceback of the actor; of any other error, where it
        # came from is what the reader needs.
        if not type(error).__module__.startswith("rlhf."):
            traceback.print_exception(error)
        return _say(f"failed: {type(error).__name__}: {error}", FAILED)
    return DONE


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """End on SIGTERM as on Ctrl-C: by whatever handles that now, which inside the event loop is a clean cancel."""
    handler = signal.getsignal(signal.SIGINT)
    if callable(handler):
        handler(signum, frame)
    else:
        raise KeyboardInterrupt


def _say(message: str, code: int) -> int:
    sys.stderr.write(f"{message}\n")
    return code


def _leave(code: int) -> None:
    """End the process with this exit code, without the interpreter's own finalization.

    Everything of ours is closed by now. Threads of Ray's C++ core outlive `ray.shutdown`, and after a SIGTERM the
    garbage collection of a finalizing interpreter has been seen to crash (SIGABRT in place of the exit code).
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _leave(main())
