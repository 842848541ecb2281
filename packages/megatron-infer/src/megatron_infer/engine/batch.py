"""Decoding a batch of token sequences, each of its own length.

Prompts are first run through the model (prefill), shorter ones padded on the right: a causal model
does not look there. Then every step feeds each running sequence its newest token. Sequences lie at
the beginning of their cache slots and end on their own, so what one request yields does not depend
on its neighbours, beyond the rounding of matrix products of another size.

All ranks of a sharded model run the same steps with the same tokens (`LocalStages`). The rank with
the last stage chooses the next tokens and broadcasts them.
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from megatron_kernels import Mask
from megatron_models import DecodingPass
from megatron_parallel import all_gather
from torch import Tensor

from megatron_infer.engine.cache import SlotCache
from megatron_infer.engine.checks import check_prompt, check_sources
from megatron_infer.engine.continuation import Continuation, FinishReason
from megatron_infer.engine.stages import AnyModel, LocalStages
from megatron_infer.errors import InferError
from megatron_infer.params import SamplingParams
from megatron_infer.sampling import Sampler

PREFILL_TOKENS = 4096
"""Prompt tokens, with padding, in one pass over several prompts; it bounds memory."""

LOGITS_TOKENS = 1024
"""Prompt tokens in one pass where all of them are scored; it bounds the memory of their logits."""

SCORED_TOKENS = 256
"""Tokens whose log-probabilities over the whole vocabulary are held in float64 at a time."""


class Batch:
    """Sequences that are decoded together, one forward pass at a time.

    Several batches of one model may take turns: each has a cache of its own. `step` computes
    gradients and drops activations out as the caller has it; wrap it in `evaluating` and
    ``torch.no_grad()``.

    Args:
        model, prompts, params, sources, stop_tokens, on_token, log_probs: as for `generate_tokens`.

    Raises:
        InferError: as `generate_tokens`.
    """

    def __init__(
        self,
        model: AnyModel,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        sources: Sequence[Sequence[int]] | None = None,
        stop_tokens: frozenset[int] = frozenset(),
        on_token: Callable[[int, int], object] | None = None,
        log_probs: bool = False,
        score_only: bool = False,
    ) -> None:
        stages = LocalStages(model)
        settings = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(settings) != len(prompts):
            raise InferError(f"{len(prompts)} prompts came with settings for {len(settings)}")
        for index, prompt in enumerate(prompts):
            check_prompt(stages, index, prompt, new_tokens=0 if score_only else 1)
        check_sources(stages, sources, prompts)
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
    ) -> "Batch":
        """Returns a batch that is complete once its prompts are scored, as for `score_tokens`."""
        settings = SamplingParams(max_new_tokens=1, temperature=0.0)
        return cls(model, prompts, settings, sources=sources, log_probs=True, score_only=True)

    @property
    def complete(self) -> bool:
        """Whether nothing is left to do."""
        return not self._to_prefill and (self._only_score or len(self.ended) == len(self._prompts))

    def step(self) -> None:
        """Runs the model once: on the next prompts, or on the newest token of each that goes on."""
        if self._to_prefill:
            rows = self._to_prefill[0]
            self.advance(rows, [self._next_prompt_tokens(row) for row in rows])
            if all(self._pending_prompt_token(row) is None for row in rows):
                self._to_prefill.popleft()
        else:
            rows = [row for row in range(len(self._prompts)) if row not in self.ended]
            self.advance(rows, [self.tokens[row][-1:] for row in rows])

    def continuations(self) -> list[Continuation]:
        """Returns what `generate_tokens` returns."""
        return [
            Continuation(
                tuple(tokens),
                self.ended[row],
                tuple(self.log_probs[row]) if self._scoring else None,
            )
            for row, tokens in enumerate(self.tokens)
        ]

    def scores(self) -> list[tuple[float, ...]]:
        """Returns what `score_tokens` returns."""
        return [
            tuple(scores[: len(prompt) - 1])  # prefill has chosen one more token
            for prompt, scores in zip(self._prompts, self.log_probs, strict=True)
        ]

    def _next_prompt_tokens(self, row: int) -> Sequence[int]:
        """Returns the next tokens of a prompt: all of it, unless its logits would be too many."""
        start = self._cached[row]
        end = start + self._max_pass_tokens if self._scoring else len(self._prompts[row])
        return self._prompts[row][start:end]

    def _pending_prompt_token(self, row: int) -> int | None:
        """Returns the next token of a prompt that is not fed to its end, else None."""
        prompt, cached = self._prompts[row], self._cached[row]
        return prompt[cached] if cached < len(prompt) else None

    def advance(self, rows: Sequence[int], new: Sequence[Sequence[int]]) -> None:
        """Feeds each row its new tokens, and choose the one that follows.

        Of a prompt that goes on, nothing is chosen: its next token follows.
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
            given = [self._pending_prompt_token(row) for row in rows]
            if None in given:
                chosen = self._sampler(following, rows)
            else:
                chosen = torch.tensor(given, device=self._device)
            if self._scoring:
                scores = self._score(logits, new, following, chosen)
        self._stages.broadcast_from_last(chosen, purpose="the chosen tokens")
        if self._scoring:
            self._stages.broadcast_from_last(scores, purpose="log-probabilities")
        for row, tokens, token, known in zip(
            rows, new, chosen.tolist(), scores.tolist(), strict=True
        ):
            if self._pending_prompt_token(row) is None:
                self._accept(row, token, known[: len(tokens)])
            else:
                self.log_probs[row] += known[: len(tokens)]

    def _pass(self, rows: Sequence[int], new: Sequence[Sequence[int]]) -> DecodingPass:
        """Returns the pass that feeds rows their new tokens.

        Its logits are ``[1, rows, v_part]`` of each row's last token, of all tokens where they are
        scored, ``[s, rows, v_part]``.
        """
        starts = [self._cached[row] for row in rows]
        self._cache.begin_pass(rows, starts)
        width = max(len(tokens) for tokens in new)
        positions, mask = self._positions_and_mask(starts, width)
        source, source_padding = self._source(rows, first=not any(starts))
        return DecodingPass(
            self._padded(new, width),
            self._cache,
            positions,
            mask,
            None if self._scoring else self._ends(new).unsqueeze(-1),
            source,
            source_padding,
        )

    def _padded(self, tokens: Sequence[Sequence[int]], width: int) -> Int[Tensor, "rows width"]:
        padded = [[*row, *[0] * (width - len(row))] for row in tokens]
        return torch.tensor(padded, device=self._device)

    def _source(
        self, rows: Sequence[int], *, first: bool
    ) -> tuple[Int[Tensor, "rows t"] | None, Bool[Tensor, "rows t"] | None]:
        """Returns the text for the encoder, in the rows' first pass, and where it is padding."""
        if self._sources is None:
            return None, None
        texts = [self._sources[row] for row in rows]
        width = max(map(len, texts)) if first else self._max_source
        lengths = torch.tensor([len(text) for text in texts], device=self._device)
        padding = torch.arange(width, device=self._device) >= lengths.unsqueeze(-1)
        return self._padded(texts, width) if first else None, padding

    def _ends(self, new: Sequence[Sequence[int]]) -> Int[Tensor, " rows"]:
        """Returns the place of each row's last new token."""
        return torch.tensor([len(tokens) - 1 for tokens in new], device=self._device)

    def _next_logits(
        self, logits: Float[Tensor, "s_or_1 rows v_part"], new: Sequence[Sequence[int]]
    ) -> Float[Tensor, "rows v"]:
        """Returns the logits of the token that follows each row's new tokens."""
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

        That is the next one of the row's new tokens, and after the last of them the chosen one.
        What lies behind it in a shorter row is 0.
        """
        scores = torch.zeros((len(new), len(logits)), dtype=torch.float64, device=self._device)
        for row, tokens in enumerate(new):
            for start in range(0, len(tokens) - 1, SCORED_TOKENS):
                end = min(start + SCORED_TOKENS, len(tokens) - 1)
                whole = all_gather(logits[start:end, row], self._tp, dim=-1, purpose="logits")
                known = whole[:, : self._stages.vocabulary].double().log_softmax(-1)
                following = torch.tensor(tokens[start + 1 : end + 1], device=self._device)
                scores[row, start:end] = known.gather(-1, following.unsqueeze(-1)).squeeze(-1)
            scores[row, len(tokens) - 1] = last[row].double().log_softmax(-1)[chosen[row]]
        return scores

    def _positions_and_mask(
        self, starts: Sequence[int], width: int
    ) -> tuple[Tensor | None, Mask | None]:
        """Returns positions and mask of the new tokens; None where all rows start alike."""
        if len(set(starts)) == 1:
            return None, None
        new = torch.arange(width, device=self._device)
        positions = torch.tensor(starts, device=self._device).unsqueeze(-1) + new
        keys = torch.arange(max(starts) + width, device=self._device)
        return positions, Mask(positions=keys.expand(len(starts), -1), query_positions=positions)

    def _accept(self, row: int, token: int, scores: Sequence[float]) -> None:
        """Adds a token to a continuation, and note if it ends; the last score is the token's."""
        if token in self._stop_tokens:
            self.log_probs[row] += scores[:-1]
            self.ended[row] = "stop"
            return
        self.log_probs[row] += scores
        self.tokens[row].append(token)
        self._on_token(row, token)
        if len(self.tokens[row]) == self._settings[row].max_new_tokens:
            self.ended[row] = "length"
        elif len(self._prompts[row]) + len(self.tokens[row]) == self._stages.positions:
            self.ended[row] = "positions"


def _group_rows(lengths: Sequence[int], max_tokens: int) -> deque[list[int]]:
    """Returns rows whose prompts go through the model together, those of similar lengths.

    A group of several prompts has at most ``max_tokens`` tokens, with padding and sources.
    """
    groups: deque[list[int]] = deque()
    for row in sorted(range(len(lengths)), key=lambda row: lengths[row]):
        if not groups or (len(groups[-1]) + 1) * lengths[row] > max_tokens:
            groups.append([])
        groups[-1].append(row)
    return groups
