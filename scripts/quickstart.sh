#!/usr/bin/env bash
# Trains a small language model with GRPO on this machine, from a fresh clone: .venv, the model, the run.
#
#   bash scripts/quickstart.sh                                  # the run of the README
#   bash scripts/quickstart.sh run.seed=2 run.name=seed2        # any setting of configs/quickstart.yaml
#   bash scripts/quickstart.sh --dry-run                        # show the plan and start nothing
#
# Arguments go to `python -m rlhf.train` after `--config configs/quickstart.yaml`. With model.path=… the model of the
# quickstart is not prepared.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

bash "$ROOT/scripts/setup_env.sh"
# `python` and every tool below are those of .venv.
export PATH="$ROOT/.venv/bin:$PATH"

own_model=true
for argument in "$@"; do
    if [[ "$argument" == model.path=* ]]; then
        own_model=false
    fi
done
if "$own_model"; then
    python "$ROOT/scripts/prepare_model.py"
fi

# The model and the runs of the quickstart are relative to the checkout.
cd "$ROOT"
exec python -m rlhf.train --config configs/quickstart.yaml "$@"
