"""Megatron's notation for uneven stages, `Et*3|(tt|)*29,m|L`, in pure Python.

Stages are separated by `|`: first those of all ranks' first chunks, then those of the second. `E`
is the embedding, `t` a transformer layer, `L` the output layer with the loss and `m` a layer of
multi-token prediction. `t*3` repeats a character, `(tt|)*29` a group. Commas are ignored.

Source: `PipelineParallelLayerLayout` of megatron-core 0.16; both parse a text alike.
"""

import re
from itertools import accumulate, pairwise

from megatron_parallel.errors import LayoutError


def count_stages(text: str) -> int:
    """Returns the number of stages in a layout string."""
    return len(_unrolled(text).split("|"))


def parse_pipeline_layout(
    text: str, num_layers: int, pp: int, multi_token_layers: int = 0
) -> tuple[range, ...]:
    """Returns the global layer indices of every stage, in the order of the model.

    A stage may have none.

    Args:
        text: As for Megatron's `--pipeline-model-parallel-layout`.
        num_layers: Number of layers of the model.
        pp: Number of pipeline ranks; it must divide the number of stages.
        multi_token_layers: Number of layers of multi-token prediction. They are on the last stage,
            just before the output layer.

    Raises:
        LayoutError: The text has an unknown character, numbers that do not fit, an embedding
            outside of the first stage, or an output layer or multi-token prediction outside of the
            last.
    """
    unrolled = _unrolled(text)
    stages = unrolled.split("|")
    where = f"pipeline layout {text!r}"
    if len(stages) % pp:
        raise LayoutError(f"{where} has {len(stages)} stages, which is not a multiple of pp={pp}")
    depths = unrolled.count("m")
    if depths != multi_token_layers:
        raise LayoutError(
            f"{where} has {depths} layers of multi-token prediction ('m'), but the model has "
            f"{multi_token_layers}"
        )
    for letter, name, index, end in (("E", "embedding", 0, "first"), ("L", "loss", -1, "last")):
        if unrolled.count(letter) != 1 or stages[index][index : index + 1 or None] != letter:
            raise LayoutError(
                f"{where}: {letter} ({name}) must occur once, at the outer end of the {end} stage"
            )
    if not stages[-1].endswith("m" * depths + "L"):
        raise LayoutError(
            f"{where}: m (multi-token prediction) must stand just before L, on the last stage"
        )
    sizes = [stage.count("t") for stage in stages]
    if sum(sizes) != num_layers:
        raise LayoutError(f"{where} has {sum(sizes)} layers ('t'), but the model has {num_layers}")
    return tuple(range(a, b) for a, b in pairwise(accumulate(sizes, initial=0)))


def _unrolled(text: str) -> str:
    """Returns the text without commas and repetitions."""
    plain = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        plain = re.sub(pattern, lambda match: match[1] * int(match[2]), plain)
    unknown = sorted(set(plain) - set("EtmL|"))
    if unknown:
        raise LayoutError(
            f"pipeline layout {text!r} has {unknown[0]!r}: use E, t, m and L, '|' between stages, "
            "and t*3 or (tt|)*2 to repeat"
        )
    return plain
