"""The models, layouts and commands of the functional matrix."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

STEPS, STOP = 50, 25
"""Steps of a run, and the step after which it is interrupted and continued."""

ROOT: Final = Path(__file__).parents[2]

RUN: Final = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 "
    "--max-position-embeddings 128 --micro-batch-size 4 --global-batch-size 32 --split 949,50,1 "
    f"--train-iters {STEPS} --lr 2e-3 --min-lr 1e-5 --lr-warmup-fraction .1 --weight-decay 1e-2 "
    "--clip-grad 1.0 --log-interval 10 --eval-interval 1000 --eval-iters 2 --deterministic-mode "
    "--device cpu --no-progress"
)
"""Flags of Megatron-LM's functional tests, with a model and a learning rate for a laptop."""


@dataclass(frozen=True)
class Model:
    """A model of the matrix.

    Attributes:
        train: Command that trains it, without layout and folders.
        prepare: Commands that make its corpus in the folder of the runs.
        losses: Names of its losses in the table.
    """

    train: str
    prepare: Sequence[str]
    losses: Sequence[str] = ("lm loss",)


_CORPUS: Final = ROOT / "corpus" / "moby_dick.jsonl"

MODELS: Final[Mapping[str, Model]] = MappingProxyType(
    {
        "gpt": Model(
            train=f"megatron-train pretrain gpt {RUN} --lr-decay-style cosine "
            "--tokenizer-model bpe --data-path gpt_text_document",
            prepare=(
                f"megatron-data train-tokenizer --input {_CORPUS} --vocab-size 2000 --output bpe",
                f"megatron-data preprocess --input {_CORPUS} --output-prefix gpt "
                "--tokenizer-model bpe --append-eod",
            ),
        ),
        "bert": Model(
            train=f"megatron-train pretrain bert {RUN} --lr-decay-style linear "
            "--tokenizer-model pieces --data-path bert_text_sentence",
            prepare=(
                f"megatron-data train-tokenizer --input {_CORPUS} --kind wordpiece "
                "--vocab-size 2000 --output pieces",
                f"megatron-data preprocess --input {_CORPUS} --output-prefix bert "
                "--tokenizer-model pieces --split-sentences",
            ),
            losses=("lm loss", "sop loss"),
        ),
    }
)
"""Models by kind."""

LAYOUTS: Final[Mapping[str, tuple[int, int]]] = MappingProxyType(
    {
        "one rank": (1, 1),
        "tp1 pp2": (1, 2),
        "tp1 pp4": (1, 4),
        "tp2 pp2": (2, 2),
        "tp4 pp1": (4, 1),
    }
)
"""Tensor-parallel and pipeline-parallel sizes by the name of the layout."""


def layout_flags(name: str) -> str:
    """Returns the flags of a layout."""
    tp, pp = LAYOUTS[name]
    if tp * pp == 1:
        return ""
    cut = f"--tensor-model-parallel-size {tp} --sequence-parallel " if tp > 1 else ""
    staged = f"--pipeline-model-parallel-size {pp} " if pp > 1 else ""
    return f"--nproc-per-node {tp * pp} {cut}{staged}"
