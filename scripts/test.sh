#!/usr/bin/env bash
# Everything that has to hold before a change lands: lint, format, types, and the tests (unit, integration, e2e).
#
#   bash scripts/test.sh                         # all of it
#   bash scripts/test.sh --full                  # and the long matrices
#   bash scripts/test.sh tests/unit -k ledger    # other arguments go to pytest
#
# Every part runs even if an earlier one fails; the exit code is 1 if any of them did. A test that is skipped without
# a reason counts as failed (tests/conftest.py).
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

PYTEST=(python -m pytest --durations=15)
FULL=false
for argument in "$@"; do
    if [[ "$argument" == --full ]]; then
        FULL=true
    else
        PYTEST+=("$argument")
    fi
done
if ! "$FULL"; then
    PYTEST+=(-m "not full")
fi

bash "$ROOT/scripts/setup_env.sh"
# `python` and every tool below are those of .venv.
export PATH="$ROOT/.venv/bin:$PATH"
cd "$ROOT"

SUMMARY=()
FAILED=0
run() { # name, command
    local name="$1" started=$SECONDS outcome=ok
    shift
    printf '\n== %s: %s\n' "$name" "$*"
    if ! "$@" </dev/null; then
        outcome=FAILED
        FAILED=1
    fi
    SUMMARY+=("$(printf '%-12s %-6s %5d s' "$name" "$outcome" "$((SECONDS - started))")")
}

run lint ruff check .
run format ruff format --check .
run types mypy --strict rlhf
run tests "${PYTEST[@]}"

printf '\n== %d s in all\n' "$SECONDS"
printf '%s\n' "${SUMMARY[@]}"
exit "$FAILED"
