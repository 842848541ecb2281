"""Megatron's text for uneven stages, `Et*3|(tt|)*29,m|L`, in pure Python.

Stages are separated by `|`, those of all ranks' first chunks before those of the second. In a
stage, `E` is the embedding, `t` a transformer layer, `L` the output layer with the loss and `m` a
layer of multi-token prediction. `t*3` repeats a character, `(tt|)*29` a group; commas only please
the eye.
Source: `PipelineParallelLayerLayout` of megatron-core 0.16, whose reading of a text is ours too.
"""

import re
from itertools import accumulate, pairwise

from megatron_parallel.errors import LayoutError


def count_stages(text: str) -> int:
    """Returns the number of stages in such a text."""
    return len(_unrolled(text).split("|"))


def parse_pipeline_layout(text: str, num_layers: int, pp: int) -> tuple[range, ...]:
    """The global layer numbers of every stage, in the order of the model; a stage may have none.

    Args:
        text: as Megatron's `--pipeline-model-parallel-layout`.
        num_layers: layers of the model.
        pp: ranks of the pipeline; the stages are a multiple of them.

    Raises:
        LayoutError: an unknown character, numbers that do not fit, an embedding that is not in the
            first stage or an output layer not in the last, or multi-token prediction.
    """
    unrolled = _unrolled(text)
    stages = unrolled.split("|")
    where = f"pipeline layout {text!r}"
    if len(stages) % pp:
        raise LayoutError(f"{where} has {len(stages)} stages, which is not a multiple of pp={pp}")
    if "m" in unrolled:
        raise LayoutError(f"{where} places multi-token prediction ('m'), and the model has none")
    for letter, name, place, end in (("E", "embedding", 0, "first"), ("L", "loss", -1, "last")):
        if unrolled.count(letter) != 1 or stages[place][place : place + 1 or None] != letter:
            raise LayoutError(
                f"{where}: {letter} ({name}) has to stand once, at the outer end of the {end} stage"
            )
    sizes = [stage.count("t") for stage in stages]
    if sum(sizes) != num_layers:
        raise LayoutError(f"{where} has {sum(sizes)} layers ('t'), but the model has {num_layers}")
    return tuple(range(a, b) for a, b in pairwise(accumulate(sizes, initial=0)))


def _unrolled(text: str) -> str:
    """Without commas and repetitions."""
    plain = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        plain = re.sub(pattern, lambda match: match[1] * int(match[2]), plain)
    unknown = sorted(set(plain) - set("EtmL|"))
    if unknown:
        raise LayoutError(
            f"pipeline layout {text!r} has {unknown[0]!r}: stages are E, t, m and L between '|', "
            "t*3 and (tt|)*2 repeat"
        )
    return plain
