"""Continuations of prompts whose tokens have a time, a height and a width."""

from collections.abc import Callable

import pytest
import torch
from megatron_infer import InferError, SamplingParams, generate_tokens, score_tokens
from megatron_infer.engine import batch as engine
from megatron_models import GPT
from megatron_parallel import Mesh, ParallelLayout
from megatron_parallel.testing import WorkerPool
from torch import Tensor

Make = Callable[..., GPT]
GREEDY = SamplingParams(max_new_tokens=10, temperature=0.0)
PROMPTS = [[5, 8], [17, 3, 44, 9, 9, 20, 1, 30, 31], [2, 60, 4, 4, 7]]


def image(before: int, rows: int, columns: int, after: int) -> Tensor:
    """Returns positions ``[3, s]`` of text, an image of ``rows x columns`` tokens, and text."""
    grid = torch.cartesian_prod(torch.arange(1), torch.arange(rows), torch.arange(columns))
    follows = before + max(rows, columns)
    return torch.cat(
        [
            torch.arange(before).expand(3, -1),
            before + grid.t(),
            torch.arange(follows, follows + after).expand(3, -1),
        ],
        1,
    )


POSITIONS = [torch.arange(2).expand(3, -1), image(2, 2, 3, 1), image(0, 1, 4, 1)]


@torch.no_grad()
def without_cache(model: GPT, prompt: list[int], known: Tensor) -> tuple[list[int], list[float]]:
    """Returns the most probable continuation by passes over whole sequences, and all scores."""
    tokens, positions = list(prompt), known
    for _ in range(GREEDY.max_new_tokens):
        logits = model(torch.tensor([tokens]), positions=positions[:, None])[:, 0, :61]
        tokens.append(int(logits[-1].argmax()))
        following = positions.max() + 1
        positions = torch.cat([positions, following.expand(3, 1)], 1)
    chosen = torch.tensor(tokens[1:])[:, None]
    return tokens[len(prompt) :], logits.log_softmax(-1).gather(1, chosen)[:, 0].tolist()


def test_new_tokens_follow_the_largest_position(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("axes")
    monkeypatch.setattr(engine, "LOGITS_TOKENS", 4)  # several passes for each prompt
    found = generate_tokens(model, PROMPTS, GREEDY, positions=POSITIONS, log_probs=True)
    scores = score_tokens(model, PROMPTS, positions=POSITIONS)
    for prompt, positions, one, score in zip(PROMPTS, POSITIONS, found, scores, strict=True):
        tokens, expected = without_cache(model, prompt, positions)
        assert list(one.tokens) == tokens
        assert one.log_probs == pytest.approx(expected, abs=1e-9)
        assert score == pytest.approx(expected[: len(prompt) - 1], abs=1e-9)
    plain = generate_tokens(model, PROMPTS, GREEDY)
    assert [one == other for one, other in zip(found, plain, strict=True)][1:] == [False, False]
    counted = [torch.arange(len(prompt)).expand(3, -1) for prompt in PROMPTS]
    assert generate_tokens(model, PROMPTS, GREEDY, positions=counted) == plain


def test_ranks_of_a_sharded_model_equal_one_rank(
    make_model: Make, make_stages: Callable[..., list[GPT]], worker_pool: WorkerPool
) -> None:
    expected = generate_tokens(make_model("axes", layers=4), PROMPTS, GREEDY, positions=POSITIONS)

    def on_ranks(mesh: Mesh) -> list:
        model = make_stages(mesh, "axes")
        return generate_tokens(model, PROMPTS, GREEDY, positions=POSITIONS)

    for layout in (ParallelLayout(tp=2, dp=1), ParallelLayout(pp=2, dp=1)):
        assert all(found == expected for found in worker_pool.run_mesh(layout, on_ranks))


def test_a_continuation_ends_before_positions_that_the_model_lacks(make_model: Make) -> None:
    model = make_model("axes", positions=16)
    positions = [POSITIONS[0], POSITIONS[1], POSITIONS[2] + 6]
    many = SamplingParams(max_new_tokens=30, temperature=0.0)
    found = generate_tokens(model, PROMPTS, many, positions=positions)
    assert [len(one.tokens) for one in found] == [14, 7, 5]
    assert {one.finish_reason for one in found} == {"positions"}


@pytest.mark.parametrize(
    ("kind", "positions", "names"),
    [
        ("llama", POSITIONS, "positions of the model have no axes; leave out `positions`"),
        ("axes", POSITIONS[:2], "got 3 prompts but positions of 2"),
        ("axes", [POSITIONS[0], POSITIONS[2], POSITIONS[2]], r"2 are \[3, 5\], but .* \[3, 9\]"),
        ("axes", [*POSITIONS[:2], POSITIONS[2] + 43], r"3 contain 47; the model has 48 .* 0 to 46"),
        ("axes", [*POSITIONS[:2], POSITIONS[2] - 1], "positions of prompt 3 contain -1"),
    ],
)
def test_positions_that_do_not_fit_are_refused(
    make_model: Make, kind: str, positions: list[Tensor], names: str
) -> None:
    with pytest.raises(InferError, match=names):
        generate_tokens(make_model(kind), PROMPTS, GREEDY, positions=positions)


def test_a_scored_prompt_may_have_the_last_position_and_a_continued_one_the_one_before(
    make_model: Make,
) -> None:
    model = make_model("axes")
    last = [torch.tensor([0, 47]).expand(3, -1)]
    (scores,) = score_tokens(model, [[5, 8]], positions=last)
    assert len(scores) == 1
    with pytest.raises(InferError, match=r"1 contain 48; the model has 48 positions.* 0 to 47"):
        score_tokens(model, [[5, 8]], positions=[last[0] + 1])
    (one,) = generate_tokens(model, [[5, 8]], GREEDY, positions=[last[0].clamp(max=46)])
    assert (len(one.tokens), one.finish_reason) == (1, "positions")


def test_padding_after_the_last_position_has_no_effect(make_model: Make) -> None:
    model = make_model("axes", positions=16)
    prompts, positions = PROMPTS[:2], [torch.tensor([0, 14]).expand(3, -1), POSITIONS[1]]
    together = generate_tokens(model, prompts, GREEDY, positions=positions)
    for prompt, own, expected in zip(prompts, positions, together, strict=True):
        assert generate_tokens(model, [prompt], GREEDY, positions=[own]) == [expected]
    assert [len(one.tokens) for one in together] == [1, 7]
