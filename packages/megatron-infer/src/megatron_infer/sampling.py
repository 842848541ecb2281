"""Sampling of the next token of every request of a batch.

Each request has its own random generator and draws one uniform number for each token, on the CPU in
float64. The result therefore depends only on its seed and its logits, not on the other requests in
the batch or on the device.
"""

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float, Int
from megatron_parallel import to_device
from torch import Tensor

from megatron_infer.errors import InferError
from megatron_infer.params import SamplingParams


class Sampler:
    """Chooses the next token of requests, without waiting for the device.

    Args:
        params: The settings of each request.
    """

    def __init__(self, params: Sequence[SamplingParams]) -> None:
        self._params = list(params)
        self._generators = [_generator(one.seed) for one in params]

    def __call__(
        self, logits: Float[Tensor, "b v"], requests: Sequence[int] | None = None
    ) -> Int[Tensor, " b"]:
        """Returns the next token of each row, int64, on the device of the logits.

        It is -1 if a logit of the row is NaN or positive infinity; see `check_tokens`.

        Args:
            logits: One row for each request.
            requests: The index of the request of each row. Defaults to all requests in order.
        """
        wrong = (logits.isnan() | logits.isposinf()).any(-1)
        requests = range(len(self._params)) if requests is None else requests
        params = [self._params[request] for request in requests]
        likeliest = logits.argmax(-1)
        is_greedy = [one.temperature == 0.0 for one in params]
        if all(is_greedy):
            return likeliest.masked_fill(wrong, -1)
        numbers = [
            torch.rand(1, generator=self._generators[request], dtype=torch.float64)
            for request in requests
        ]
        uniform = to_device(torch.cat(numbers), logits.device)
        drawn = _inverse_cdf(sampling_probabilities(logits, params), uniform)
        greedy = to_device(torch.tensor(is_greedy), logits.device)
        return torch.where(greedy, likeliest, drawn).masked_fill(wrong, -1)


def check_tokens(tokens: Iterable[int]) -> None:
    """Checks tokens of a `Sampler`.

    Raises:
        InferError: A token is -1, since a logit was NaN or positive infinity.
    """
    if -1 in tokens:
        raise InferError(
            "the logits of the model contain NaN or infinity; check its weights and dtype"
        )


def sampling_probabilities(
    logits: Float[Tensor, "b v"], params: Sequence[SamplingParams]
) -> Float[Tensor, "b v"]:
    """Returns the distribution, in float64, from which the next token of each row is drawn.

    Rows are independent. A row of temperature 0 has all its mass on the most likely token.
    """
    vocabulary, device = logits.shape[-1], logits.device
    result = torch.zeros(logits.shape, dtype=torch.float64, device=device)
    result.scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    warm = [row for row, one in enumerate(params) if one.temperature > 0.0]
    if not warm:
        return result
    chosen = [params[row] for row in warm]
    rows = to_device(torch.tensor(warm), device)

    def column(values: list[float]) -> Tensor:
        return to_device(torch.tensor(values, dtype=torch.float64), device).unsqueeze(-1)

    temperature = column([one.temperature for one in chosen])
    # The largest logit is subtracted before the division, which would overflow at a temperature
    # near 0.
    if all(one.top_k == 0 and one.top_p == 1.0 for one in chosen):
        warmed = logits[rows].double()
        result[rows] = ((warmed - warmed.amax(-1, keepdim=True)) / temperature).softmax(-1)
        return result
    ordered, tokens = logits[rows].sort(dim=-1, descending=True, stable=True)
    ordered = ordered.double()
    ordered = (ordered - ordered[:, :1]) / temperature
    rank = torch.arange(vocabulary, device=device)
    limit = column([float(min(one.top_k, vocabulary) or vocabulary) for one in chosen])
    weights = ordered.masked_fill(rank >= limit, float("-inf")).softmax(-1)
    before = weights.cumsum(-1) - weights
    # 2 means no limit, because the cumulative sum of a long tail may be rounded to 1.
    mass = column([one.top_p if one.top_p < 1.0 else 2.0 for one in chosen])
    weights = weights.masked_fill(before >= mass, 0.0)
    result[rows] = torch.zeros_like(weights).scatter(-1, tokens, weights)
    return result / result.sum(-1, keepdim=True)


def _inverse_cdf(weights: Float[Tensor, "b v"], uniform: Float[Tensor, " b"]) -> Int[Tensor, " b"]:
    """Returns the token at which the cumulative weights exceed ``uniform`` times their total."""
    running = weights.cumsum(-1)
    total = running[:, -1]
    # The target must stay below the total, which is after the last token with a weight.
    below = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniform * total, below).unsqueeze(-1)
    return torch.searchsorted(running, target, right=True).squeeze(-1)


def _generator(seed: int | None) -> torch.Generator:
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator
