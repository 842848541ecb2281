"""Compares a run's validation loss with n-gram models: `python tooling/beside_ngrams.py RUN`.

The n-gram models are trained on the run's training tokens and measured on its validation samples,
with the same context up to their order. Bits per byte do not depend on the tokenizer: they are the
summed loss of all tokens divided by the bytes of their text.
"""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from megatron_data import build_gpt_datasets
from ngram import Ids, NgramModel
from tokenizers import Tokenizer

ORDERS = (2, 3, 4, 5)


@dataclass(frozen=True)
class HeldOut:
    """The validation samples of a run: inputs and labels, both `[r, s]`, and the size of their
    text.

    Attributes:
        size: Bytes of text of the labels; a special token has none.
    """

    inputs: Ids
    labels: Ids
    size: int

    def bits_per_byte(self, loss: float) -> float:
        """Converts nats per token to bits per byte."""
        return loss * self.labels.size / math.log(2) / self.size


def configuration(run: Path) -> dict[str, Any]:
    """Returns the configuration that a run has written into its folder."""
    return yaml.safe_load((run / "config.yaml").read_text())


def _datasets(config: dict[str, Any], sizes: tuple[int | None, int, int]):
    data = config["data"]
    by_split = {name: data.get(f"{name}_data_path") for name in ("train", "valid")}
    return build_gpt_datasets(
        data.get("data_path") or by_split,
        data["split"],
        sizes,
        sequence_length=data["seq_length"],
        seed=config["training"]["seed"],
    )


def held_out(config: dict[str, Any]) -> HeldOut:
    """Reads the samples of an evaluation of the run."""
    training = config["training"]
    batch = training.get("global_batch_size") or training["micro_batch_size"]
    samples = _datasets(config, (0, config["evaluation"]["eval_iters"] * batch, 0)).valid
    rows = [samples[index] for index in range(config["evaluation"]["eval_iters"] * batch)]
    labels = np.stack([row["labels"] for row in rows]).astype(np.int64)
    tokenizer = Tokenizer.from_file(str(Path(config["data"]["tokenizer_model"], "tokenizer.json")))
    sizes = np.zeros(tokenizer.get_vocab_size(), dtype=np.int64)
    for piece, number in tokenizer.get_vocab().items():
        sizes[number] = len(piece)  # of a byte-level BPE each character stands for a byte
    sizes[[*tokenizer.get_added_tokens_decoder()]] = 0
    inputs = np.stack([row["tokens"] for row in rows]).astype(np.int64)
    return HeldOut(inputs, labels, int(sizes[labels].sum()))


def trained_on(config: dict[str, Any]) -> Ids:
    """Returns one epoch of the training samples as a stream, `[t]`; their order hardly matters."""
    samples = _datasets(config, (None, 0, 0)).train
    return np.concatenate([samples[i]["tokens"] for i in range(len(samples))]).astype(np.int64)


def last_validation(run: Path) -> tuple[int, float]:
    """Returns step and loss of the last evaluation that a run has recorded."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [record for record in records if record["kind"] == "validation"][-1]
    return last["iteration"], last["lm loss"]


def ngram_losses(config: dict[str, Any], text: HeldOut) -> dict[int, float]:
    """Returns the validation loss of each n-gram model in nats per token, by order."""
    tokens, vocabulary = trained_on(config), config["model"]["vocab_size"]
    return {
        order: NgramModel(tokens, vocabulary, order).loss(text.inputs, text.labels)
        for order in ORDERS
    }


def compare(run: Path) -> tuple[float, dict[int, float]]:
    """Prints the losses of a run and of the n-gram models; returns them in nats per token."""
    config = configuration(run)
    text = held_out(config)
    step, loss = last_validation(run)
    ngrams = ngram_losses(config, text)
    print(f"validation on {text.labels.size:,} tokens, {text.size:,} bytes of text:")
    rows = {f"the model after {step:,} steps": loss}
    rows |= {f"{order}-gram, Kneser-Ney": value for order, value in ngrams.items()}
    for name, value in rows.items():
        bits = text.bits_per_byte(value)
        print(f"  {name:<28} {bits:.3f} bits per byte   {value:.4f} nats per token, "
              f"perplexity {math.exp(value):.1f}")  # fmt: skip
    return loss, ngrams


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tooling/beside_ngrams.py RUN")
    compare(Path(sys.argv[1]))
