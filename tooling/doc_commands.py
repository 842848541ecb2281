"""Commands of the documentation: how they are made smaller, and which are checked, not run."""

import contextlib
import io
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from doc_pages import ROOT
from parsers import console_scripts, parser_of

DATA = "--data-path book_text_document --tokenizer-model tokenizer"

# Replacements for the dots in a page.
DOTS = {"torchrun ...": "torchrun --standalone --nproc-per-node 2", "pretrain gpt ...": DATA}

# Sizes instead of dots, for a line that is only parsed and not run.
SIZES = (
    "--num-layers 32 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 "
    "--micro-batch-size 1 --train-iters 1000"
)

# Appended to a command line: of two equal flags the last one counts.
SMALLER = {
    "pretrain gpt": "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 128 --micro-batch-size 2 --train-iters 2 --lr-warmup-iters 0 "
    "--eval-interval 2 --eval-iters 1 --no-progress",
    "pretrain t5": "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 4 --eval-iters 1 --no-progress",
    "pretrain bert": "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 2 --eval-iters 1 --no-progress",
    "finetune classification": "--seq-length 32 --epochs 1 --no-progress",
    "finetune gpt": "--seq-length 64 --micro-batch-size 2 --train-iters 2 --eval-iters 0",
    "dry-run gpt": "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --ffn-hidden-size 128 "
    "--vocab-size 64 --world-size 16 --pipeline-model-parallel-size 2 --global-batch-size 32 "
    "--on cpu",
    "prove gpt": "--steps 1 --world-size 2 --tensor-model-parallel-size 2 "
    "--pipeline-model-parallel-size 1",
    "--hybrid-context-parallel": "--micro-batch-size 1",
    "-m megatron_train": "--pipeline-model-parallel-size 2",
    "--exit-interval": "--exit-interval 1",
    "--iteration": "--iteration 2",
    "megatron-infer serve": "--port 0",
}

# Files that the reader of a page has at its start; "a=b" is b under the name a.
GIVEN = {
    "README.md": "corpus",
    "docs/bert.md": "corpus reviews",
    "docs/t5.md": "corpus bert-vocab",
    "docs/getting-started.md": "corpus",
    "docs/parallelism.md": "tokenizer book_text_document",
    "docs/recipes.md": "tokenizer book_text_document",
    "docs/state-space-models.md": "tokenizer book_text_document",
    "docs/serving.md": "runs/book",
    "docs/packages/megatron-ckpt.md": "runs/book gpt2",
    "docs/packages/megatron-data.md": "texts more",
    "docs/packages/megatron-data/preprocessing.md": "tokenizer talks tales captions whale titles "
    "pictures my-corpus bert-vocab gpt2-vocab gpt2-merges",
    "docs/packages/megatron-infer.md": "runs/book gpt2",
    "docs/packages/megatron-train.md": "tokenizer book_text_document talks "
    "letters_text_document=book_text_document runs/base=runs/book run.yaml",
    "packages/megatron-ckpt/README.md": "runs/toy=runs/book gpt2-folder=gpt2",
    "packages/megatron-data/README.md": "texts",
    "packages/megatron-infer/README.md": "runs/book",
    "packages/megatron-train/README.md": "tokenizer book_text_document",
}

TYPED = {"megatron-infer chat": "Call me\n/quit\n"}
NEEDS = {"python": "transformers"}  # the program that reads the input of a page


@dataclass(frozen=True)
class NotRun:
    """Commands that are not run, the reason, and the check that replaces the run."""

    pattern: str
    reason: str
    check: Callable[[str], None]

    def covers(self, text: str) -> bool:
        return re.fullmatch(self.pattern, text) is not None


def check_nox(text: str) -> None:
    """Checks that the nox session exists."""
    session = text.partition("nox -s ")[2].split()[0]
    defined = re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(), re.MULTILINE)
    assert session in defined, f"noxfile.py has no session {session!r}"


def check_pip(text: str) -> None:
    """Checks that the named files, packages and extras of this repository exist."""
    words = shlex.split(" ".join(expand(text.removeprefix("pip install "))))
    for word in words:
        path, _, extra = word.partition("[")
        if word in ("-c", "-r", "transformers"):
            continue
        assert (ROOT / path).exists(), f"there is no {path}"
        if extra:
            project = (ROOT / path / "pyproject.toml").read_text()
            assert f"\n{extra.rstrip(']')} = [" in project, f"{path} has no extra [{extra}"


def check_torchrun(text: str) -> None:
    """Checks the flags of torchrun; `as_written` checks those of the program."""
    from torch.distributed.run import get_args_parser

    with contextlib.redirect_stderr(io.StringIO()) as output:
        try:
            get_args_parser().parse_args(shlex.split(text)[1:])
        except SystemExit:
            raise AssertionError(output.getvalue()) from None


def check_parsed(text: str) -> None:
    """Checks that the parser of the command accepts the line."""
    name, *words = shlex.split(text)
    parser_of(console_scripts()[name]).parse_args(words)


def check_files(text: str) -> None:
    """Checks that the named files exist, and that a script that starts the line is executable."""
    words = [word for word in text.split() if "/" in word and "=" not in word]
    assert words, text
    for word in words:
        assert (ROOT / word).is_file(), f"there is no {word}"
        run_directly = text.rsplit(maxsplit=1)[-1] == word and word.endswith(".sh")
        assert not run_directly or os.access(ROOT / word, os.X_OK), f"{word} is not executable"


def check_nothing(text: str) -> None:
    """Checks nothing: the command is not of this project."""


FAMILY = f"({'|'.join(path.stem for path in sorted((ROOT / 'docs/families').glob('*.md')))})"
"""Matches the name of a family with a page of its own."""

NOT_RUN = (
    NotRun(r"megatron-train config from-megatron .*", "the script is Megatron-LM's", check_parsed),
    NotRun(r"(pip install nox && )?nox -s \w+", "minutes of work; CI runs it", check_nox),
    NotRun(r"nox -s \w+ -- .*", "up to an hour of work", check_nox),
    NotRun(r"pytest \S.* -k NAME", "NAME stands for a new family", check_files),
    NotRun(r"python tooling/generated_docs.py", "nox -s docs runs it", check_files),
    NotRun(
        rf"megatron-(infer|ckpt|train) .*\b{FAMILY}(-hf|-talks|-exported)\b.*",
        "the folder is the reader's; integration_tests/parity/test_families.py converts one",
        check_parsed,
    ),
    NotRun(r"pip install [^&]*", "needs an index; `nox -s build` installs the wheels", check_pip),
    NotRun(r"python3 -m venv .venv && .*", "makes an environment", check_nothing),
    NotRun(r"torchrun --nnodes .*", "needs several machines", check_torchrun),
    NotRun(r"PYTHON=\S+ tooling/gpu.sh", "needs a GPU", check_files),
    NotRun(
        r"megatron-data .* s3://.*",
        "needs S3; integration_tests/parity/test_s3.py runs such commands",
        check_parsed,
    ),
    NotRun(r"pip download .*", "needs an index", check_nothing),
    NotRun(r"(unzip|awk) .*", "reads a download", check_nothing),
    NotRun(
        r"megatron-(ckpt|train) .*\bminilm\b .*",
        "a download; integration_tests/parity/test_finetune_minilm.py runs these commands",
        check_parsed,
    ),
    NotRun(
        r"megatron-ckpt convert --from-hf SmolLM2\S*\.gguf \S+",
        "a download; integration_tests/parity/test_real_models.py converts it",
        check_parsed,
    ),
)


def expand(text: str) -> list[str]:
    """Returns the words of a command line after Bash's brace expansion."""
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {text}"], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def smaller(text: str) -> str:
    """Returns a command line with the flags of `SMALLER` appended and dots replaced."""
    for dots, meant in DOTS.items():
        text = text.replace(dots, dots[:-3] + meant if dots.startswith("pretrain") else meant)
    text = re.sub(r" \.\.\.(?= |$)", f" {DATA}", text)
    flags = [small for part, small in SMALLER.items() if f" {part} " in f" {text} "]
    return " ".join([text, *flags])


def as_written(text: str) -> tuple[str, int]:
    """Returns the command with ``--print-config`` and the page's sizes, and its number of ranks."""
    dotted = "..." in text
    ranks = 1
    if text.startswith("torchrun"):
        nodes = re.search(r"--nnodes (\d+) --nproc-per-node (\d+)", text)
        ranks = int(nodes[1]) * int(nodes[2]) if nodes else 4
    words = text[text.index("pretrain gpt") :].replace(" ...", "")
    return f"megatron-train {words} {f'{DATA} {SIZES}' if dotted else ''} --print-config", ranks
