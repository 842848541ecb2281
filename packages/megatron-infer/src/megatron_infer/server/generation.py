"""The generation for one request, one forward pass at a time."""

from megatron_data import Tokenizer

from megatron_infer.detokenize import TextStream
from megatron_infer.engine.batch import Batch
from megatron_infer.engine.generate import stop_tokens
from megatron_infer.engine.stages import AnyModel
from megatron_infer.params import SamplingParams
from megatron_infer.server.fields import GenerateRequest
from megatron_infer.server.job import Answer, Job, TextDelta


class Generation:
    """A running request: its batch, and the text of each prompt so far.

    Args:
        model: A whole model on any device.
        tokenizer: The tokenizer of the model.
        job: The request, which gets the pieces of text as they become final.
        stop: Tokens that end a text beside those of the tokenizer.

    Raises:
        InferError: As for `generate_tokens`.
    """

    def __init__(
        self, model: AnyModel, tokenizer: Tokenizer, job: Job, stop: frozenset[int]
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._job = job
        self._texts = [""] * len(job.tokens)
        self._streams = [TextStream(tokenizer, context=tokens) for tokens in job.tokens]
        if job.request.tokens_to_generate == 0:
            self._batch = Batch.scoring(model, job.tokens)
        else:
            self._batch = Batch(
                model,
                job.tokens,
                [_sampling(job.request, index) for index in range(len(job.tokens))],
                stop_tokens=stop_tokens(tokenizer) | stop,
                on_token=lambda index, token: self._show(index, self._streams[index].push(token)),
                log_probs=job.request.logprobs,
            )

    def step(self) -> Answer | None:
        """Runs the model once, and returns the answer after the last step.

        The caller puts the model in eval mode and disables gradients.
        """
        self._batch.step()
        if not self._batch.complete:
            return None
        if self._job.request.tokens_to_generate == 0:
            scores = self._batch.scores()
            return self._answer([()] * len(scores), scores, ["length"] * len(scores))
        for index, stream in enumerate(self._streams):
            self._show(index, stream.finish())
        done = self._batch.continuations()
        return self._answer(
            [one.tokens for one in done],
            [one.log_probs or () for one in done],
            [one.finish_reason for one in done],
        )

    def _show(self, index: int, text: str) -> None:
        self._texts[index] += text
        if text:
            self._job.put(TextDelta(index, text))

    def _answer(
        self,
        continuations: list[tuple[int, ...]],
        scores: list[tuple[float, ...]],
        reasons: list[str],
    ) -> Answer:
        request = self._job.request
        whole = [[*old, *new] for old, new in zip(self._job.tokens, continuations, strict=True)]
        return Answer(
            text=[old + new for old, new in zip(request.prompts, self._texts, strict=True)],
            segments=[self._segments(tokens) for tokens in whole],
            tokens=whole,
            logprobs=[list(one) for one in scores] if request.logprobs else None,
            finish_reasons=reasons,
        )

    def _segments(self, tokens: list[int]) -> list[str]:
        """Returns the text of each token; a character of several tokens belongs to the last one."""
        stream = TextStream(self._tokenizer)
        segments = [stream.push(token) for token in tokens]
        segments[-1] += stream.finish()
        return segments


def _sampling(request: GenerateRequest, index: int) -> SamplingParams:
    seed = request.random_seed
    return SamplingParams(
        max_new_tokens=request.tokens_to_generate,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p or 1.0,
        seed=None if seed is None else seed + index,
    )
