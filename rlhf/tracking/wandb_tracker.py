"""Weights & Biases: everything it writes stays in the run folder, and no secret is in it.

wandb records more than it is given. Its run metadata holds the whole command line (which may carry a secret as an
override) and the git remote (which may carry a token), so both are switched off. Its service logs to the user's cache
folder unless told otherwise at start. The API key is in wandb's memory and the service's environment only.

A run that is resumed has the same wandb id. wandb itself never goes back: it ignores a step that isn't above the last
one. Offline we go back for it: the part that was written before is set aside in `wandb/rewound/`, where `wandb sync`
doesn't look, and the steps that are kept are written again from the run's own logs. So there is one part to upload, and
it has every step once. (Several parts with one id overwrite each other when they are uploaded.) Online the server keeps
what it has: steps that are done again show the values of the first time, and `metrics.jsonl` has those that count.
"""

from __future__ import annotations

import json
import os
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import yaml

from rlhf.config import dump_config
from rlhf.config.schema import Config
from rlhf.tracking.folder import RunFolder
from rlhf.tracking.trackers import RunStatus

# wandb's own defaults are 90 s for the start and no limit for the end, which would hold back an exit for ever.
INIT_TIMEOUT_S = 30.0
FINISH_TIMEOUT_S = 60.0
# In the run folder; `replace` removes it with everything else.
RUN_ID = "wandb-run-id"
# In the run folder's `wandb/`: what was written offline of steps that were done again later.
REWOUND = "rewound"


class WandbTracker:
    """Metrics and redacted configuration in a wandb run. `show` tells the person who watches where they went."""

    name = "wandb"

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._run: Any = None
        self._online = False
        self._logged = False

    def start(self, config: Config, folder: RunFolder) -> None:
        """Start the wandb run; `online` falls back to offline without a key or without an answer, and says so."""
        import wandb

        self._config, self._folder = config, folder
        with _service_logs_in(folder.path / "wandb"):
            if config.tracking.wandb.mode == "online":
                # `verify=False`: the start below finds out whether the key is right. `prompt=False`: a run that
                # nobody watches must not wait for an answer.
                if wandb.login(prompt=False, verify=False):
                    try:
                        self._run = _init("online", config, folder)
                        self._online = True
                        return
                    except wandb.errors.Error as error:
                        why = f"the server can't be used ({error})"
                        # wandb's service holds on to the id of a run that it could not start.
                        (folder.path / RUN_ID).unlink()
                else:
                    why = "no API key is configured (WANDB_API_KEY or `wandb login`)"
                self._show(f"wandb: {why}; going on offline")
            self._run = _init("offline", config, folder)
        self._show(f"wandb: offline in {folder.path / 'wandb'}; `wandb sync` uploads it")

    def rewind(self, step: int | None) -> None:
        """Offline, begin a part that has the kept steps and no other; online wandb keeps what it has."""
        if self._online:
            return
        if self._logged:
            self._run.finish(exit_code=1)
            self._logged = False
            with _service_logs_in(self._folder.path / "wandb"):
                self._run = _init("offline", self._config, self._folder)
        _set_earlier_parts_aside(Path(self._run.dir).parent)
        for kept, metrics in sorted(_logged_steps(self._folder).items()):
            self.log(metrics, kept)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One point of each metric."""
        self._logged = True
        self._run.log(dict(metrics), step=step)

    def finish(self, status: RunStatus) -> None:
        """End the wandb run, uploading for at most a minute; a run that didn't end well is marked as failed."""
        self._run.finish(exit_code=0 if status == "done" else 1)


def _init(mode: Literal["online", "offline"], config: Config, folder: RunFolder) -> Any:
    """A wandb run of our own: one that the user has open in the same process is left alone."""
    import wandb

    settings = wandb.Settings(
        silent=True,
        console="off",
        disable_git=True,
        save_code=False,
        x_disable_meta=True,
        init_timeout=INIT_TIMEOUT_S,
        finish_timeout=FINISH_TIMEOUT_S,
    )
    return wandb.init(
        mode=mode,
        project=config.tracking.wandb.project,
        entity=config.tracking.wandb.entity,
        name=config.run.name,
        dir=str(folder.path),
        config=yaml.safe_load(dump_config(config)),
        reinit="create_new",
        settings=settings,
        id=_run_id(folder),
        resume="allow",
    )


def _run_id(folder: RunFolder) -> str:
    """The id of the wandb run of this folder: a run that is resumed goes on in the same curves."""
    file = folder.path / RUN_ID
    if not file.exists():
        file.write_text(uuid.uuid4().hex, encoding="utf-8")
    return file.read_text(encoding="utf-8").strip()


def _set_earlier_parts_aside(current: Path) -> None:
    """Move what was written offline before `current`, wandb's folder of now, away from where `wandb sync` looks."""
    aside = current.parent / REWOUND
    for part in sorted(current.parent.glob("offline-run-*")):
        if part.name != current.name:
            aside.mkdir(exist_ok=True)
            # wandb names a part by the second, so one that begins now may get the name of one that was moved.
            part.rename(aside / f"{len(list(aside.iterdir())) + 1}-{part.name}")


def _logged_steps(folder: RunFolder) -> dict[int, dict[str, float]]:
    """What the run's own logs hold of each step, evaluations included; null, which was no number, as NaN."""
    steps: dict[int, dict[str, float]] = defaultdict(dict)
    for path in (folder.evaluations_jsonl, folder.metrics_jsonl):
        for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            line = json.loads(text)
            values = {name: float("nan") if value is None else value for name, value in line.items() if name != "step"}
            steps[line["step"]] |= values
    return steps


@contextmanager
def _service_logs_in(path: Path) -> Iterator[None]:
    """Have the wandb service that is started in the block log below `path`, unless the user chose a cache folder."""
    variable = "WANDB_CACHE_DIR"
    if variable in os.environ:
        yield
        return
    os.environ[variable] = str(path)
    try:
        yield
    finally:
        del os.environ[variable]
