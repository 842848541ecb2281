"""What layers report of some steps: the largest attention scores, and statistics of outputs.

Nothing here waits for the device, and every rank gets the same numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float64
from megatron_models import OUTPUT_COUNTS, ModelConfig, output_name, scores_name
from megatron_optim import QKClipConfig
from megatron_parallel import collect_shardings
from torch import Tensor, nn

from megatron_train.errors import TrainError

MAX_LOGIT = "max attention logit"
"""Name of the number of the log line, as in Megatron-LM."""


@dataclass(frozen=True)
class Reports:
    """What layers report in one step: numbers of values by name.

    Attributes:
        counters: Values that are summed.
        maxima: Values of which the largest counts.
    """

    counters: Mapping[str, int]
    maxima: Mapping[str, int]


NO_REPORTS = Reports({}, {})


class Observation:
    """Chooses what layers report in each step, and computes what follows from it.

    Args:
        model: The model.
        stages: This rank's stages.
        clip: Settings of QK-Clip.
        interval: Steps between log lines.
        scores: Whether the largest attention score is recorded.
        outputs: Whether statistics of the outputs of layers are recorded.

    Raises:
        TrainError: The scores of a layer cannot be bounded or measured.
    """

    def __init__(
        self,
        model: ModelConfig,
        stages: Sequence[nn.Module],
        clip: QKClipConfig,
        interval: int,
        *,
        scores: bool,
        outputs: bool,
    ) -> None:
        self._clip, self._interval = clip, interval
        self._logs_scores, self._logs_outputs = scores or clip.qk_clip, outputs
        self._outputs = tuple(model.numbered_mixers)
        self._heads: dict[int, int] = {}
        if self._logs_scores:
            self._heads = _heads_of_layers(model, clip)
        self._rows = _rows_of(stages, clip) if clip.qk_clip else {}

    def reports(self, iteration: int) -> Reports:
        """Returns what layers report in a step."""
        logs = iteration % self._interval == 0
        counters: dict[str, int] = {}
        maxima: dict[str, int] = {}
        if logs and self._logs_outputs:
            counters |= {output_name(layer): OUTPUT_COUNTS for layer in self._outputs}
            maxima |= {output_name(layer): 1 for layer in self._outputs}
        if self._clip.qk_clip or (logs and self._logs_scores):
            maxima |= {scores_name(layer): heads for layer, heads in self._heads.items()}
        return Reports(counters, maxima)

    def measured(
        self,
        counts: Mapping[str, Float64[Tensor, " values"]],
        maxima: Mapping[str, Float64[Tensor, " values"]],
        iteration: int,
    ) -> dict[str, Tensor]:
        """Returns the numbers of a step that are recorded, if it has a log line."""
        found: dict[str, Tensor] = {}
        if iteration % self._interval:
            return found
        if self._logs_scores:
            scores = [maxima[scores_name(layer)] for layer in self._heads]
            found[MAX_LOGIT] = torch.cat(scores).amax()
        if self._logs_outputs:
            for layer in self._outputs:
                squares, zeros, broken, size = counts[output_name(layer)].unbind()
                found[f"output rms of layers.{layer}"] = (squares / (size - broken)).sqrt()
                found[f"output zeros of layers.{layer}"] = zeros / size
                found[f"output nonfinite of layers.{layer}"] = broken / size
                found[f"output max of layers.{layer}"] = maxima[output_name(layer)][0]
        return found

    def factors(self, maxima: Mapping[str, Float64[Tensor, " heads"]]) -> dict[str, Tensor]:
        """Returns factors of the rows of this rank's weights that bound the next scores.

        The factor of a head is ``threshold / score`` if the score is above it, otherwise 1. Heads
        that share keys have the smallest of their factors, as in Megatron-LM.
        """
        found = {}
        for name, (layer, groups, exponents) in self._rows.items():
            largest = maxima[scores_name(layer)].view(groups, -1).amax(1)
            limit = self._clip.qk_clip_threshold
            gamma = torch.where(largest > limit, limit / largest, 1.0)
            found[name] = gamma[:, None] ** exponents.to(gamma.device)
        return found


def _heads_of_layers(model: ModelConfig, clip: QKClipConfig) -> dict[int, int]:
    """Returns the number of heads of each layer with attention."""
    flag = "--qk-clip" if clip.qk_clip else "--log-max-attention-logit"
    found: dict[int, int] = {}
    for layer, mixers in model.numbered_mixers.items():
        for mixer in mixers:
            if not mixer.multiply_adds_per_pair():
                continue
            try:
                rows = mixer.clipped_rows(clip.qk_clip_alpha) if clip.qk_clip else {"any": ()}
            except ValueError as error:
                raise TrainError(f"--qk-clip has no effect in layer {layer}: {error}") from None
            if not rows or layer in found:
                raise TrainError(
                    f"{flag} does not support the {type(mixer).__name__} of layer {layer}; "
                    "leave it out"
                )
            found[layer] = mixer.heads
    if not found:
        raise TrainError(f"{flag} has no effect, since no layer has attention; leave it out")
    return found


def _rows_of(stages: Sequence[nn.Module], clip: QKClipConfig) -> dict[str, tuple[int, int, Tensor]]:
    """Returns layer, number of groups and exponents of the rows of each weight of this rank."""
    found: dict[str, tuple[int, int, Tensor]] = {}
    for stage in stages:
        table = collect_shardings(stage)
        for name, module in stage.named_modules():
            rows_of = getattr(module, "clipped_rows", None)
            if rows_of is None:
                continue
            for parameter, rows in rows_of(clip.qk_clip_alpha).items():
                values = [torch.full((n,), e, dtype=torch.float64) for n, e in rows]
                full = f"{name}.{parameter}"
                found[full] = (module.layer, table[full].shape[0], torch.cat(values))
    return found
