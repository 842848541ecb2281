"""Numbers of parameters of a stage, by the kind of sum that their gradients need."""

from collections.abc import Iterator

from layouts.traffic.experts import routed_parameters
from layouts.traffic.jobs import Job

Sizes = dict[str, list[int]]
"""Numbers of elements in forward order, by kind.

Kinds are `whole`, `partial` (over the tensor axis), `tied` (over two stages) and `expert`.
"""


def parameters(job: Job, *, first: bool, last: bool) -> Sizes:
    """Returns the parameters of a stage, without empty kinds."""
    found: Sizes = {}
    for part in (ends := outside(job, first=first, last=last))[0], *blocks(job), ends[1]:
        for kind, sizes in part.items():
            found.setdefault(kind, []).extend(sizes)
    return {kind: sizes for kind, sizes in found.items() if sizes}


def outside(job: Job, *, first: bool, last: bool) -> tuple[Sizes, Sizes]:
    """Returns the parameters before the blocks of a stage and after them.

    Those before are embeddings, those after the last norm and the output layer.
    """
    c, t = job.config, job.layout.tp
    word = c.padded_vocab_size * c.hidden_size // t
    tied = not c.untie_embeddings_and_output_weights
    several = job.layout.pp * job.layout.vpp > 1
    before: Sizes = {"tied" if tied and several else "whole": [word] * (first or (last and tied))}
    if first and has_biases(job):
        positions = c.max_position_embeddings * c.hidden_size
        before.setdefault(seen_in_part(job), []).append(positions)
    after: Sizes = {"whole": [word] * (last and not tied)}
    after.setdefault(seen_in_part(job), []).extend(norm(job) * last)
    return before, after


def blocks(job: Job) -> Iterator[Sizes]:
    """Yields the parameters of each block of a stage."""
    c, t = job.config, job.layout.tp
    h, f = c.hidden_size, c.ffn_hidden_size // t
    fused = (c.num_attention_heads + 2 * c.num_query_groups) * c.kv_channels // t
    inner = c.num_attention_heads * c.kv_channels // t
    pairs = [(fused, inner), ((2 if c.activation == "swiglu" else 1) * f, f)]
    for _ in range(c.num_layers // (job.layout.pp * job.layout.vpp)):
        block: Sizes = {"whole": [], "partial": [], "expert": []}
        local = block[seen_in_part(job)]
        for columns, rows in pairs[:1] if c.num_experts else pairs:
            local.extend(norm(job))
            block["whole"].append(columns * h)
            block["whole"].extend([columns] * has_biases(job))
            block["whole"].append(h * rows)
            local.extend([h] * has_biases(job))
        if c.num_experts:
            local.extend(norm(job))
            for kind, sizes in routed_parameters(c, job.layout).items():
                block[kind].extend(sizes)
        yield block


def norm(job: Job) -> list[int]:
    """Returns the sizes of a norm's gain, and of its bias if it has one."""
    return [job.config.hidden_size] * (2 if has_biases(job) else 1)


def has_biases(job: Job) -> bool:
    """Returns whether the model is GPT-2's kind: with biases and learned positions."""
    return job.config.normalization == "LayerNorm"


def seen_in_part(job: Job) -> str:
    """Returns the kind of parameters that see only their rank's positions.

    That is `partial` under sequence parallelism.
    """
    return "partial" if job.sequence_parallel else "whole"
