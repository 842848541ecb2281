"""Decoding of a batch of token sequences of different lengths.

Prompts first run through the model (prefill), with shorter ones padded on the right, where a causal
model does not attend. Padding does not enter the state of recurrent layers. Every later step feeds
the newest token of each running sequence. Each sequence starts at the beginning of its cache slot
and ends independently. The result of a request therefore does not depend on the others in the
batch, except for rounding in matrix products of another size.

All ranks of a sharded model run the same steps with the same tokens (`LocalStages`). The rank with
the last stage chooses the next tokens and broadcasts them.
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from megatron_kernels import Mask
from megatron_models import DecodingPass
from megatron_parallel import all_gather, to_device
from megatron_parallel.imagined import read_numbers
from torch import Tensor

from megatron_infer.engine.cache import SlotCache
from megatron_infer.engine.checks import check_prompt, check_sources
from megatron_infer.engine.continuation import Continuation, FinishReason
from megatron_infer.engine.positions import AxisPositions
from megatron_infer.engine.stages import AnyModel, LocalStages
from megatron_infer.errors import InferError
from megatron_infer.params import SamplingParams
from megatron_infer.sampling import Sampler, check_tokens

PREFILL_TOKENS = 4096
"""Prompt tokens, including padding, in one pass over several prompts; bounds the memory."""

LOGITS_TOKENS = 1024
"""Prompt tokens in one pass if all of them are scored; bounds the memory of their logits."""

SCORED_TOKENS = 256
"""Tokens whose log-probabilities over the vocabulary are stored in float64 at a time."""


class Batch:
    """Sequences that are decoded together, one forward pass at a time.

    Several batches of one model may alternate, since each has its own cache. `step` does not change
    the gradient mode or the train mode; call it within `evaluating` and ``torch.no_grad()``.

    Args:
        model, prompts, params, sources, positions, stop_tokens, on_token, log_probs: As for
            `generate_tokens`.
        score_only: Whether to score the prompts without generating tokens. Defaults to False.

    Raises:
        InferError: As for `generate_tokens`.
    """

    def __init__(
        self,
        model: AnyModel,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        sources: Sequence[Sequence[int]] | None = None,
        positions: Sequence[Int[Tensor, "3 _"]] | None = None,
        stop_tokens: frozenset[int] = frozenset(),
        on_token: Callable[[int, int], object] | None = None,
        log_probs: bool = False,
        score_only: bool = False,
    ) -> None:
        stages = LocalStages(model)
        settings = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(settings) != len(prompts):
            raise InferError(
                f"got {len(prompts)} prompts but settings for {len(settings)}; give one for each"
            )
        for index, prompt in enumerate(prompts):
            check_prompt(stages, index, prompt, new_tokens=0 if score_only else 1)
        check_sources(stages, sources, prompts)
        self._axis_positions: AxisPositions | None = None
        self._lengths = [len(prompt) for prompt in prompts]
        if positions is not None:
            count = [each.max_new_tokens for each in settings]
            room = 0 if score_only else 1
            self._axis_positions = AxisPositions(stages, prompts, positions, count, room)
            self._lengths = list(map(max, self._lengths, self._axis_positions.following))
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.log_probs: list[list[float]] = [[] for _ in prompts]
        self.ended: dict[int, FinishReason] = {}
        self._stages = stages
        self._prompts = prompts
        self._settings = settings
        self._sources = sources
        self._stop_tokens = stop_tokens
        self._on_token = on_token or (lambda row, token: None)
        self._scoring = log_probs
        self._only_score = score_only
        self._sampler = Sampler(settings)
        self._cached = [0] * len(prompts)
        self._max_pass_tokens = LOGITS_TOKENS if log_probs else PREFILL_TOKENS
        self._max_source = max(map(len, sources)) if sources else 0
        read = sources or [()] * len(prompts)
        lengths = [len(prompt) + len(text) for prompt, text in zip(prompts, read, strict=True)]
        self._to_prefill = _group_rows(lengths, self._max_pass_tokens)
        self._device, self._tp = stages.device, stages.mesh.axis("tp")
        length = max(len(p) + s.max_new_tokens for p, s in zip(prompts, settings, strict=True))
        self._cache = SlotCache(
            len(prompts),
            min(length, stages.positions),
            max_source=self._max_source,
            device=self._device,
        )

    @classmethod
    def scoring(
        cls,
        model: AnyModel,
        prompts: Sequence[Sequence[int]],
        *,
        sources: Sequence[Sequence[int]] | None = None,
        positions: Sequence[Int[Tensor, "3 _"]] | None = None,
    ) -> "Batch":
        """Returns a batch that is complete once its prompts are scored, as for `score_tokens`."""
        settings = SamplingParams(max_new_tokens=1, temperature=0.0)
        return cls(
            model,
            prompts,
            settings,
            sources=sources,
            positions=positions,
            log_probs=True,
            score_only=True,
        )

    @property
    def complete(self) -> bool:
        """Whether all sequences are finished."""
        return not self._to_prefill and (self._only_score or len(self.ended) == len(self._prompts))

    def step(self) -> None:
        """Runs the model once: on the next prompts, or on the newest token of each sequence."""
        if self._to_prefill:
            rows = self._to_prefill[0]
            self.advance(rows, [self._next_prompt_tokens(row) for row in rows])
            if all(self._pending_prompt_token(row) is None for row in rows):
                self._to_prefill.popleft()
        else:
            rows = [row for row in range(len(self._prompts)) if row not in self.ended]
            self.advance(rows, [self.tokens[row][-1:] for row in rows])

    def continuations(self) -> list[Continuation]:
        """Returns the result of `generate_tokens`."""
        return [
            Continuation(
                tuple(tokens),
                self.ended[row],
                tuple(self.log_probs[row]) if self._scoring else None,
            )
            for row, tokens in enumerate(self.tokens)
        ]

    def scores(self) -> list[tuple[float, ...]]:
        """Returns the result of `score_tokens`."""
        return [
            tuple(scores[: len(prompt) - 1])  # without the token that prefill has chosen
            for prompt, scores in zip(self._prompts, self.log_probs, strict=True)
        ]

    def _next_prompt_tokens(self, row: int) -> Sequence[int]:
        """Returns the next tokens of a prompt: all of them, unless too many logits would result."""
        start = self._cached[row]
        end = start + self._max_pass_tokens if self._scoring else len(self._prompts[row])
        return self._prompts[row][start:end]

    def _pending_prompt_token(self, row: int) -> int | None:
        """Returns the next token of a prompt that is not completely processed, else None."""
        prompt, cached = self._prompts[row], self._cached[row]
        return prompt[cached] if cached < len(prompt) else None

    def advance(self, rows: Sequence[int], new: Sequence[Sequence[int]]) -> None:
        """Feeds each row its new tokens and chooses the next token.

        For a prompt that is not completely processed, the next token is that of the prompt.
        """
        logits = self._stages.run(self._pass(rows, new))
        for row, tokens in zip(rows, new, strict=True):
            self._cached[row] += len(tokens)
        width = max(len(tokens) for tokens in new)
        chosen = torch.zeros(len(rows), dtype=torch.int64, device=self._device)
        scores = torch.zeros(
            (len(rows), width if self._scoring else 0), dtype=torch.float64, device=self._device
        )
        if logits is not None:
            following = self._next_logits(logits, new)
            pending = [self._pending_prompt_token(row) for row in rows]
            known = [token for token in pending if token is not None]
            chosen = (
                self._there(known) if len(known) == len(rows) else self._sampler(following, rows)
            )
            if self._scoring:
                scores = self._score(logits, new, following, chosen)
        # One message and one wait for tokens and scores: float64 has all tokens exactly.
        results = torch.cat((chosen.double().unsqueeze(-1), scores), -1)
        self._stages.broadcast_from_last(results, purpose="the chosen tokens")
        values, size = read_numbers(results, lambda: [0.0] * results.numel()), results.shape[1]
        check_tokens(int(token) for token in values[::size])
        for index, (row, tokens) in enumerate(zip(rows, new, strict=True)):
            token, *log_probs = values[index * size : (index + 1) * size]
            if self._pending_prompt_token(row) is None:
                self._accept(row, int(token), log_probs[: len(tokens)])
            else:
                self.log_probs[row] += log_probs[: len(tokens)]

    def _pass(self, rows: Sequence[int], new: Sequence[Sequence[int]]) -> DecodingPass:
        """Returns the pass that feeds rows their new tokens.

        Its logits are ``[1, rows, v_part]`` for the last token of each row, or ``[s, rows,
        v_part]`` for all tokens if they are scored.
        """
        starts = [self._cached[row] for row in rows]
        self._cache.begin_pass(rows, starts)
        width = max(len(tokens) for tokens in new)
        positions, mask = self._positions_and_mask(starts, width)
        if self._axis_positions is not None:
            positions = self._axis_positions.take(rows, starts, width)
        source, source_padding = self._source(rows, first=not any(starts))
        return DecodingPass(
            self._padded(new, width),
            self._cache,
            positions,
            mask,
            None if self._scoring else self._ends(new).unsqueeze(-1),
            source,
            source_padding,
            self._padding(new, width),
        )

    def _padding(
        self, tokens: Sequence[Sequence[int]], width: int
    ) -> Bool[Tensor, "rows width"] | None:
        """Returns which new tokens are padding; None if all rows have as many."""
        lengths = [len(row) for row in tokens]
        if min(lengths) == width:
            return None
        real = self._there(lengths).unsqueeze(-1)
        return torch.arange(width, device=self._device) >= real

    def _padded(self, tokens: Sequence[Sequence[int]], width: int) -> Int[Tensor, "rows width"]:
        padded = [[*row, *[0] * (width - len(row))] for row in tokens]
        return self._there(padded)

    def _source(
        self, rows: Sequence[int], *, first: bool
    ) -> tuple[Int[Tensor, "rows t"] | None, Bool[Tensor, "rows t"] | None]:
        """Returns the encoder input for the first pass of the rows, and its padding mask."""
        if self._sources is None:
            return None, None
        texts = [self._sources[row] for row in rows]
        width = max(map(len, texts)) if first else self._max_source
        lengths = self._there([len(text) for text in texts])
        padding = torch.arange(width, device=self._device) >= lengths.unsqueeze(-1)
        return self._padded(texts, width) if first else None, padding

    def _there(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Int[Tensor, "..."]:
        """Returns integers on the device of the model."""
        return to_device(torch.tensor(values), self._device)

    def _ends(self, new: Sequence[Sequence[int]]) -> Int[Tensor, " rows"]:
        """Returns the index of the last new token of each row."""
        return self._there([len(tokens) - 1 for tokens in new])

    def _next_logits(
        self, logits: Float[Tensor, "s_or_1 rows v_part"], new: Sequence[Sequence[int]]
    ) -> Float[Tensor, "rows v"]:
        """Returns the logits of the token that follows the new tokens of each row."""
        last = logits[0]
        if self._scoring:
            last = logits[self._ends(new), torch.arange(len(new), device=self._device)]
        whole = all_gather(last, self._tp, dim=-1, purpose="logits")
        return whole[:, : self._stages.vocabulary]

    def _score(
        self,
        logits: Float[Tensor, "s rows v_part"],
        new: Sequence[Sequence[int]],
        last: Float[Tensor, "rows v"],
        chosen: Int[Tensor, " rows"],
    ) -> Float[Tensor, "rows s"]:
        """Returns the log-probability, in float64, of the token after each new token.

        After the last new token of a row this is the chosen token. Entries after it in a shorter
        row are 0.
        """
        scores = torch.zeros((len(new), len(logits)), dtype=torch.float64, device=self._device)
        for row, tokens in enumerate(new):
            for start in range(0, len(tokens) - 1, SCORED_TOKENS):
                end = min(start + SCORED_TOKENS, len(tokens) - 1)
                whole = all_gather(logits[start:end, row], self._tp, dim=-1, purpose="logits")
                known = whole[:, : self._stages.vocabulary].double().log_softmax(-1)
                following = self._there(tokens[start + 1 : end + 1])
                scores[row, start:end] = known.gather(-1, following.unsqueeze(-1)).squeeze(-1)
        known = last.double().log_softmax(-1).gather(-1, chosen.clamp(min=0).unsqueeze(-1))
        return scores.scatter(-1, self._ends(new).unsqueeze(-1), known)

    def _positions_and_mask(
        self, starts: Sequence[int], width: int
    ) -> tuple[Tensor | None, Mask | None]:
        """Returns positions and mask of the new tokens; None if all rows have the same start."""
        if len(set(starts)) == 1:
            return None, None
        new = torch.arange(width, device=self._device)
        positions = self._there(starts).unsqueeze(-1) + new
        keys = torch.arange(max(starts) + width, device=self._device)
        return positions, Mask(positions=keys.expand(len(starts), -1), query_positions=positions)

    def _accept(self, row: int, token: int, scores: Sequence[float]) -> None:
        """Adds a token to a continuation and records its end; the last score is the token's."""
        if token in self._stop_tokens:
            self.log_probs[row] += scores[:-1]
            self.ended[row] = "stop"
            return
        self.log_probs[row] += scores
        self.tokens[row].append(token)
        self._on_token(row, token)
        if len(self.tokens[row]) == self._settings[row].max_new_tokens:
            self.ended[row] = "length"
        elif self._lengths[row] + len(self.tokens[row]) == self._stages.positions:
            self.ended[row] = "positions"


def _group_rows(lengths: Sequence[int], max_tokens: int) -> deque[list[int]]:
    """Returns groups of rows of similar lengths whose prompts are processed in one pass.

    A group of several prompts has at most ``max_tokens`` tokens, including padding and sources.
    """
    groups: deque[list[int]] = deque()
    for row in sorted(range(len(lengths)), key=lambda row: lengths[row]):
        if not groups or (len(groups[-1]) + 1) * lengths[row] > max_tokens:
            groups.append([])
        groups[-1].append(row)
    return groups
