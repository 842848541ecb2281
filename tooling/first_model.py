"""Trains the README's first model with the README's commands: `nox -s first_model`.

Runs the commands of the README from the tokenizer to the sample in `runs/first-model`, as written,
and prints their times and the losses of the model and of n-gram models. `--write` copies the loss
curve to `docs/images/first-model.png`.
"""

import argparse
import os
import resource
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from beside_ngrams import compare
from doc_pages import ROOT, commands

FOLDER = ROOT / "runs" / "first-model"
CORPUS = "corpus/world_english_bible.jsonl"
LAST = "megatron-infer generate"
PICTURE = ROOT / "docs" / "images" / "first-model.png"


def readme_commands() -> list[str]:
    """Returns the README's commands from the first that names the corpus to the sample."""
    texts = [command.text for command in commands(ROOT / "README.md")]
    first = next(number for number, text in enumerate(texts) if CORPUS in text)
    last = next(n for n, text in enumerate(texts) if n > first and text.startswith(LAST))
    return texts[first : last + 1]


def run_folder(texts: list[str]) -> Path:
    """Returns the folder that the README's training saves into."""
    words = shlex.split(next(text for text in texts if " pretrain " in text))
    return Path(words[words.index("--save") + 1])


def timed(text: str) -> tuple[float, float]:
    """Runs a command; returns its wall-clock seconds and its CPU seconds."""
    words = shlex.split(text)
    print(f"\n$ {text}", flush=True)
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    script = str(Path(sys.executable).with_name(words[0]))
    status = subprocess.run([script, *words[1:]], check=False).returncode
    took, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if status:
        sys.exit(f"first_model: error: {words[0]} exited with {status}; see its message above")
    return took, sum(after[:2]) - sum(before[:2])


def main() -> None:
    """Runs the commands, compares the losses, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"draw {PICTURE.relative_to(ROOT)}")
    write = parser.parse_args().write
    texts = readme_commands()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    (FOLDER / "corpus").symlink_to(ROOT / "corpus")
    os.chdir(FOLDER)
    rows = [(" ".join(text.split()[:2]), *timed(text)) for text in texts]
    print()
    loss, ngrams = compare(run_folder(texts))
    print(f"\n{'command':<32} {'seconds':>8} {'CPU seconds':>12}")
    for name, seconds, cpu in rows:
        print(f"{name:<32} {seconds:8.0f} {cpu:12.0f}")
    print(f"{'all':<32} {sum(row[1] for row in rows):8.0f} {sum(row[2] for row in rows):12.0f}")
    if write:
        shutil.copyfile(run_folder(texts) / "loss.png", PICTURE)
        print(f"wrote {PICTURE.relative_to(ROOT)}")
    if not loss < min(ngrams.values()):
        sys.exit("first_model: error: the model is no better than an n-gram model")


if __name__ == "__main__":
    main()
