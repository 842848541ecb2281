"""Compares forward passes of a batch-invariant model with those of a fast one; interleaved.

A GPT of Llama's shape computes the logits of 16 sequences, in one pass, in chunks of 64 tokens with
a cache, and one token after another for the last 16 tokens. Rows "16 new tokens" are those last
passes alone: each has one new token of each sequence, and up to 255 in the cache. Milliseconds of
CPU time are medians; the rate is that of the fast model, divided by the other's time. The last
column counts rows of the batch whose logits have other bits alone, and in chunks.

    python tooling/bench/batch_invariant.py [--repeats 7] [--threads 1]
"""

import argparse
import time
from collections.abc import Callable, Iterable
from functools import partial
from statistics import median

import torch
from megatron_models import GPT, GPTConfig, Placement, StaticKVCache, batch_invariant
from megatron_parallel import Mesh
from torch import Tensor

BATCH, LENGTH, CHUNK, DECODED = 16, 256, 64, 16
CONFIG = GPTConfig(
    num_layers=6,
    hidden_size=384,
    num_attention_heads=6,
    vocab_size=8192,
    max_position_embeddings=LENGTH,
    position_embedding_type="rope",
    normalization="RMSNorm",
    activation="swiglu",
    add_bias_linear=False,
)


def in_chunks(model: GPT, tokens: Tensor, sizes: list[int], dtype: torch.dtype) -> Tensor:
    """Returns the logits of tokens that a cache gets in chunks."""
    mesh = Mesh.single()
    cache = StaticKVCache(CONFIG, mesh, batch_size=len(tokens), max_length=LENGTH, dtype=dtype)
    return torch.cat([model(part, cache=cache) for part in tokens.split(sizes, 1)])


class Decoding:
    """The last tokens of sequences, one after another, after a cache got those before."""

    def __init__(self, models: Iterable[GPT], tokens: Tensor, dtype: torch.dtype) -> None:
        self.tokens = tokens
        self.caches = {}
        for model in models:
            cache = StaticKVCache(
                CONFIG, Mesh.single(), batch_size=len(tokens), max_length=LENGTH, dtype=dtype
            )
            model(tokens[:, :-DECODED], cache=cache)
            self.caches[model] = cache

    def __call__(self, model: GPT) -> None:
        cache = self.caches[model]
        cache.truncate(LENGTH - DECODED)
        for part in self.tokens[:, -DECODED:].split(1, 1):
            model(part, cache=cache)


def other_rows(model: GPT, tokens: Tensor, dtype: torch.dtype) -> tuple[int, int]:
    """Returns how many rows of a batch have other bits alone, and in chunks."""
    batch = model(tokens)
    chunks = in_chunks(model, tokens, [CHUNK] * (LENGTH // CHUNK), dtype)
    alone = [model(tokens[row : row + 1])[:, 0] for row in range(BATCH)]
    different = [not torch.equal(found, batch[:, row]) for row, found in enumerate(alone)]
    in_parts = [not torch.equal(chunks[:, row], batch[:, row]) for row in range(BATCH)]
    return sum(different), sum(in_parts)


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7, help="rounds")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tokens = torch.randint(CONFIG.vocab_size, (BATCH, LENGTH))
    print("| dtype | pass | fast, CPU ms | batch-invariant, CPU ms | rate | rows that differ |")
    print("|---|---|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        placement = Placement(Mesh.single(), dtype=dtype)
        models = GPT(CONFIG, placement), GPT(CONFIG, batch_invariant(CONFIG, placement))
        chunks = [CHUNK] * (LENGTH // CHUNK)
        decoding = [LENGTH - DECODED, *[1] * DECODED]
        with torch.no_grad():
            last, last_alone = (Decoding(models, each, dtype) for each in (tokens, tokens[:1]))
        passes: dict[str, Callable[[GPT], Tensor | None]] = {
            "batch of 16": lambda model: model(tokens),
            "alone": lambda model: model(tokens[:1]),
            "chunks of 64": partial(in_chunks, tokens=tokens, sizes=chunks, dtype=dtype),
            "chunks of 240, 1, 1, ...": partial(
                in_chunks, tokens=tokens, sizes=decoding, dtype=dtype
            ),
            f"{DECODED} new tokens": last,
            f"{DECODED} new tokens, alone": last_alone,
        }
        with torch.no_grad():
            different = [other_rows(model, tokens, dtype) for model in models]
            for name, run in passes.items():
                taken: list[list[float]] = [[], []]
                for repeat in range(arguments.repeats + 1):
                    for model, seconds in zip(models, taken, strict=True):
                        start = time.process_time()
                        run(model)
                        if repeat:
                            seconds.append(time.process_time() - start)
                fast, invariant = (1e3 * median(seconds) for seconds in taken)
                rate = median(a / b for a, b in zip(*taken, strict=True))
                rows = " / ".join(f"{a} alone, {b} in chunks" for a, b in different)
                kind = str(dtype).removeprefix("torch.")
                print(
                    f"| {kind} | {name} | {fast:.0f} | {invariant:.0f} | {rate:.2f} | {rows} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
