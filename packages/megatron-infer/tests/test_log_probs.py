"""Log-probabilities compared with one forward pass of the model in float64."""

from collections.abc import Callable

import pytest
import torch
from megatron_infer import InferError, Sampler, SamplingParams, generate_tokens, score_tokens
from megatron_infer.engine import batch as engine
from megatron_models import GPT
from megatron_parallel import Mesh, ParallelLayout
from megatron_parallel.testing import WorkerPool

PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6, 5], [7]]
DRAWN = [SamplingParams(max_new_tokens=n, temperature=0.7, top_k=9, seed=n) for n in (6, 1, 9)]


def expected(model: GPT, tokens: list[int]) -> torch.Tensor:
    """Returns the log-probabilities of one pass over the sequence, without cache and batch."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens]))[:, 0, : model.config.vocab_size]
    following = torch.tensor(tokens[1:]).unsqueeze(-1)
    return logits[:-1].log_softmax(-1).gather(-1, following).squeeze(-1)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("chunk", [256, 3])
def test_log_probs_are_those_of_one_forward_pass(
    make_model: Callable[..., GPT], kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "SCORED_TOKENS", chunk)
    monkeypatch.setattr(engine, "LOGITS_TOKENS", 2 * chunk)
    model = make_model(kind).eval()
    for prompt, one in zip(
        PROMPTS, generate_tokens(model, PROMPTS, DRAWN, log_probs=True), strict=True
    ):
        whole = [*prompt, *one.tokens]
        assert one.log_probs is not None
        torch.testing.assert_close(
            torch.tensor(one.log_probs, dtype=torch.float64), expected(model, whole)
        )
        scored = score_tokens(model, [whole, [1, 2, 3]])[0]
        torch.testing.assert_close(
            torch.tensor(scored, dtype=torch.float64), expected(model, whole)
        )


def test_a_long_prompt_is_scored_in_slices(
    make_model: Callable[..., GPT], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("llama")
    prompts = [[place * 7 % 61 for place in range(length)] for length in (23, 4, 3, 10)]
    whole = generate_tokens(model, prompts, DRAWN[0], log_probs=True)
    made: list[int] = []
    assert model.output is not None
    model.output.register_forward_hook(lambda _, given, out: made.append(out.shape[:2].numel()))
    monkeypatch.setattr(engine, "LOGITS_TOKENS", 10)
    pieces = generate_tokens(model, prompts, DRAWN[0], log_probs=True)
    assert [one.tokens for one in pieces] == [one.tokens for one in whole]
    for one, other in zip(pieces, whole, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-9)
    assert made[:5] == [2 * 4, 10, 10, 10, 3]


def test_log_probs_change_no_token(make_model: Callable[..., GPT]) -> None:
    model = make_model()
    plain = generate_tokens(model, PROMPTS, DRAWN)
    scored = generate_tokens(model, PROMPTS, DRAWN, log_probs=True)
    assert [one.tokens for one in plain] == [one.tokens for one in scored]
    assert all(one.log_probs is None for one in plain)


def test_a_stop_token_has_no_score(make_model: Callable[..., GPT]) -> None:
    model = make_model()
    greedy = SamplingParams(max_new_tokens=8, temperature=0.0)
    stop = generate_tokens(model, PROMPTS, greedy)[0].tokens[4]
    one = generate_tokens(
        model, PROMPTS[:1], greedy, stop_tokens=frozenset([stop]), log_probs=True
    )[0]
    assert one.finish_reason == "stop"
    assert one.log_probs is not None
    assert len(one.log_probs) == len(PROMPTS[0]) + len(one.tokens) - 1


def test_a_stop_token_that_is_chosen_first_leaves_the_scores_of_the_prompt(
    make_model: Callable[..., GPT],
) -> None:
    model = make_model()
    greedy = SamplingParams(max_new_tokens=8, temperature=0.0)
    first = generate_tokens(model, PROMPTS[:1], greedy)[0].tokens[0]
    (one,) = generate_tokens(
        model, PROMPTS[:1], greedy, stop_tokens=frozenset([first]), log_probs=True
    )
    assert (one.tokens, one.finish_reason) == ((), "stop")
    assert one.log_probs == pytest.approx(expected(model, PROMPTS[0]).tolist(), abs=1e-9)


def test_the_token_0_has_its_own_score(
    make_model: Callable[..., GPT], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    monkeypatch.setattr(
        Sampler, "__call__", lambda _, logits, *rows: torch.zeros(len(logits), dtype=torch.int64)
    )
    (one,) = generate_tokens(model, [[3, 1]], SamplingParams(max_new_tokens=2), log_probs=True)
    assert one.tokens == (0, 0)
    assert one.log_probs == pytest.approx(expected(model, [3, 1, 0, 0]).tolist(), abs=1e-9)


def test_scoring_takes_texts_up_to_the_models_positions(make_model: Callable[..., GPT]) -> None:
    model = make_model(positions=12)
    full = [place % 5 for place in range(12)]
    assert len(score_tokens(model, [full])[0]) == 11
    assert score_tokens(model, []) == []
    assert score_tokens(model, [[1]]) == [()]
    with pytest.raises(InferError, match="13 tokens and the model has 12 positions; shorten"):
        score_tokens(model, [[*full, 1]])


@pytest.mark.parametrize(
    ("layout", "sequence_parallel"),
    [
        (ParallelLayout(tp=2, pp=2, dp=1), False),
        (ParallelLayout(tp=2, dp=1), True),
        (ParallelLayout(cp=2, dp=1), False),
        (ParallelLayout(pp=2, vpp=2, dp=1), False),
    ],
    ids=["tp2-pp2", "tp2-sequence", "cp2", "pp2-vpp2"],
)
def test_scores_on_ranks_equal_those_of_one_rank(
    make_model: Callable[..., GPT],
    make_stages: Callable[..., list[GPT]],
    worker_pool: WorkerPool,
    monkeypatch: pytest.MonkeyPatch,
    layout: ParallelLayout,
    sequence_parallel: bool,
) -> None:
    one = generate_tokens(make_model("llama", layers=4), PROMPTS, DRAWN, log_probs=True)

    def on_ranks(mesh: Mesh) -> list[tuple[float, ...]]:
        monkeypatch.setattr(engine, "LOGITS_TOKENS", 5)  # the first prompt in two slices
        model = make_stages(mesh, "llama", sequence_parallel=sequence_parallel)
        found = generate_tokens(model, PROMPTS, DRAWN, log_probs=True)
        return [tuple(each.log_probs or ()) for each in found]

    for found in worker_pool.run_mesh(layout, on_ranks):
        for mine, whole in zip(found, one, strict=True):
            assert mine == pytest.approx(whole.log_probs, abs=1e-9)
