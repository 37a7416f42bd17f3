#!/usr/bin/env bash
# Everything of the weight sync that a CPU can't run: parity over nccl after two syncs, and its benchmark.
#
#   bash scripts/gpu_check.sh
#
# Needs two GPUs (nccl doesn't put learner and engine on one) and vLLM's CUDA build: `pip install -e '.[gpu,dev]'`.
# Without a GPU it says so and exits with 0; with one GPU only, or without CUDA builds, with 3.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"
if [[ -d .venv ]]; then
    export PATH="$ROOT/.venv/bin:$PATH"
fi

if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
    echo "no GPU here"
    exit 0
fi
GPUS="$(python -c 'import torch; print(torch.cuda.device_count())')"
if ((GPUS < 2)); then
    echo "two GPUs are needed, and torch sees $GPUS ($(nvidia-smi -L | wc -l) on this machine)"
    exit 3
fi

python -m pytest tests/integration/test_weight_layouts.py -k nccl -rs --durations=5
if [[ -d models/smollm2-135m-instruct ]]; then
    python scripts/benchmarks/weight_sync.py --device cuda --engines 1 --rounds 5
else
    echo "no benchmark: models/smollm2-135m-instruct is not there (scripts/quickstart.sh makes it)"
fi
