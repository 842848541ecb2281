from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from megatron_infer import InferError, Sampler, SamplingParams, generate_tokens
from megatron_infer.engine import batch as engine
from megatron_infer.engine.stages import LocalStages
from megatron_models import GPT, DecodingPass
from megatron_parallel import Mesh, ParallelLayout
from megatron_parallel.testing import WorkerPool

Make = Callable[..., GPT]
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0)
LAYOUTS = {
    "tp2": ParallelLayout(tp=2, dp=1),
    "tp2-sequence": ParallelLayout(tp=2, dp=1),
    "cp2": ParallelLayout(cp=2, dp=1),
    "pp2": ParallelLayout(pp=2, dp=1),
    "pp2-vpp2": ParallelLayout(pp=2, vpp=2, dp=1),
    "v": ParallelLayout(pp=2, vpp=2, dp=1, stage_mapping="v"),
    "tp2-pp2": ParallelLayout(tp=2, pp=2, dp=1),
    "tp2-sequence-pp2-vpp2": ParallelLayout(tp=2, pp=2, vpp=2, dp=1),
}
PROMPTS = [[5], [17, 3, 44, 9, 9, 20, 1], [2, 60], [11, 12, 13, 14], [30, 31]]


@torch.no_grad()
def without_cache(model: GPT, prompt: list[int], params: SamplingParams) -> tuple[int, ...]:
    """Returns the continuation by definition: each token from a pass over the whole sequence."""
    tokens, sampler = list(prompt), Sampler([params])
    for _ in range(params.max_new_tokens):
        logits = model(torch.tensor([tokens]))[-1, :, : model.config.vocab_size]
        tokens.append(int(sampler(logits)[0]))
    return tuple(tokens[len(prompt) :])


@pytest.mark.parametrize(
    "kind", ["gpt2", "llama", "window", "llama4", "latent", "sparse", "mamba", "hybrid"]
)
@pytest.mark.parametrize(
    "params",
    [GREEDY, SamplingParams(max_new_tokens=12, seed=3, top_p=0.95)],
    ids=["greedy", "drawn"],
)
def test_a_ragged_batch_with_cache_equals_each_prompt_alone_without_cache(
    make_model: Make, kind: str, params: SamplingParams
) -> None:
    model = make_model(kind)
    together = generate_tokens(model, PROMPTS, params)
    expected = [without_cache(model, prompt, params) for prompt in PROMPTS]
    assert [one.tokens for one in together] == expected
    assert len({token for one in expected for token in one}) > 10  # not a constant


def test_results_do_not_depend_on_other_prompts(make_model: Make) -> None:
    model = make_model("llama")
    params = [
        SamplingParams(max_new_tokens=3 + 4 * row, seed=row, temperature=row / 2)
        for row in range(len(PROMPTS))
    ]
    together = generate_tokens(model, PROMPTS, params)
    backwards = generate_tokens(model, PROMPTS[::-1], params[::-1])[::-1]
    alone = [
        generate_tokens(model, [prompt], one)[0]
        for prompt, one in zip(PROMPTS, params, strict=True)
    ]
    assert together == alone == backwards


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (5, [4, 2, 4, 7]),
        (4, [4, 2, 4, 7]),  # exactly as many as are allowed
        (3, [1, 2, 2, 4, 7]),  # a single prompt may have more
        (6, [6, 4, 7]),
    ],
)
def test_prompts_are_prefilled_in_groups_of_bounded_size(
    make_model: Make, monkeypatch: pytest.MonkeyPatch, most: int, expected: list[int]
) -> None:
    model = make_model()
    whole = generate_tokens(model, PROMPTS, GREEDY)
    sizes = []
    forward = GPT.forward

    def counting(self: GPT, tokens: torch.Tensor, **settings: object) -> torch.Tensor:
        sizes.append(tokens.numel())
        return forward(self, tokens, **settings)

    monkeypatch.setattr(engine, "PREFILL_TOKENS", most)
    monkeypatch.setattr(GPT, "forward", counting)
    assert generate_tokens(model, PROMPTS, GREEDY) == whole
    assert sizes[: len(expected)] == expected


@contextmanager
def passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[DecodingPass]]:
    """Returns a list that gets the passes of all models."""
    made: list[DecodingPass] = []
    run = LocalStages.run

    def recorded(stages: LocalStages, decoding_pass: DecodingPass) -> torch.Tensor | None:
        made.append(decoding_pass)
        return run(stages, decoding_pass)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStages, "run", recorded)
        yield made


def test_each_group_of_prompts_is_bounded_by_itself(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "PREFILL_TOKENS", 5)
    prompts = [[1], [1, 2], [3, 4], [5, 6]]
    with passes(monkeypatch) as made:
        generate_tokens(make_model(), prompts, SamplingParams(max_new_tokens=1))
    assert [one.tokens.tolist() for one in made] == [[[1, 0], [1, 2]], [[3, 4], [5, 6]]]


def test_prompts_of_equal_lengths_need_no_positions_mask_and_padding(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, two = make_model(), SamplingParams(max_new_tokens=2, temperature=0.0)
    with passes(monkeypatch) as made:
        generate_tokens(model, [[1, 2], [3, 4]], two)
        generate_tokens(model, [[1, 2], [3]], two)
    needed = [
        (one.positions is not None, one.mask is not None, one.padding is not None) for one in made
    ]
    # Prompts that begin together have the same positions; the shorter one is padded.
    assert needed == [(False,) * 3, (False,) * 3, (False, False, True), (True, True, False)]


def test_a_batch_has_no_log_probs_unless_asked_for(make_model: Make) -> None:
    model, two = make_model(), SamplingParams(max_new_tokens=2, temperature=0.0)
    batch = engine.Batch(model, [[1, 2], [3]], two)
    with torch.no_grad():
        while not batch.complete:
            batch.step()
    assert batch.log_probs == [[], []]
    assert [one.log_probs for one in batch.continuations()] == [None, None]


@contextmanager
def counting_logits(model: GPT) -> Iterator[list[torch.Size]]:
    """Returns a list that gets the shapes of the output of the output layer."""
    made: list[torch.Size] = []
    assert model.output is not None
    hook = model.output.register_forward_hook(lambda _, given, out: made.append(out.shape))
    yield made
    hook.remove()


def test_a_prefill_computes_only_the_logits_of_last_tokens(make_model: Make) -> None:
    model = make_model("llama")
    width = model.config.padded_vocab_size
    with counting_logits(model) as made:
        generate_tokens(model, PROMPTS, SamplingParams(max_new_tokens=2, temperature=0.0))
    assert made == [(1, len(PROMPTS), width)] * 2


def test_a_long_prefill_of_a_large_vocabulary_computes_only_the_last_logits(
    make_model: Make,
) -> None:
    model = make_model("llama", vocab_size=128_000, positions=2049, dtype=torch.float32)
    prompt = [place % 997 for place in range(2048)]
    with counting_logits(model) as made:
        generate_tokens(model, [prompt], SamplingParams(max_new_tokens=1, temperature=0.0))
    assert [shape.numel() for shape in made] == [model.config.padded_vocab_size]


@pytest.mark.parametrize("layout", ["tp2-sequence", "cp2", "pp2-vpp2"])
def test_a_long_prefill_on_ranks_computes_only_the_last_logits(
    make_stages: Callable[..., list[GPT]], worker_pool: WorkerPool, layout: str
) -> None:
    def on_ranks(mesh: Mesh) -> tuple[int, int]:
        options = {"vocab_size": 128_000, "positions": 2049, "dtype": torch.float32}
        cut = "sequence" in layout
        stages = make_stages(mesh, "llama", sequence_parallel=cut, **options)
        prompt = [place % 997 for place in range(2048)]
        most = SamplingParams(max_new_tokens=1, temperature=0.0)
        if stages[-1].output is None:
            generate_tokens(stages, [prompt], most)
            return 0, 0
        with counting_logits(stages[-1]) as made:
            generate_tokens(stages, [prompt], most)
        return sum(shape.numel() for shape in made), len(made)

    made = worker_pool.run_mesh(LAYOUTS[layout], on_ranks)
    widths = {"tp2-sequence": [64_000, 64_000], "cp2": [128_000] * 2, "pp2-vpp2": [0, 128_000]}
    assert made == [(width, min(width, 1)) for width in widths[layout]]


def test_a_stop_token_ends_a_continuation_and_is_left_out(make_model: Make) -> None:
    model = make_model()
    free = generate_tokens(model, PROMPTS, GREEDY)
    stop = free[1].tokens[5]
    stopped = generate_tokens(model, PROMPTS, GREEDY, stop_tokens=frozenset([stop]))
    for before, after in zip(free, stopped, strict=True):
        if stop in before.tokens:
            assert after.tokens == before.tokens[: before.tokens.index(stop)]
            assert after.finish_reason == "stop"
        else:
            assert after == before
            assert after.finish_reason == "length"


def test_a_continuation_ends_with_the_models_positions(make_model: Make) -> None:
    model = make_model(positions=10)
    params = SamplingParams(max_new_tokens=6, temperature=0.0)
    short, long = generate_tokens(model, [[1, 2], [1, 2, 3, 4, 5, 6, 7]], params)
    assert (len(short.tokens), short.finish_reason) == (6, "length")
    assert (len(long.tokens), long.finish_reason) == (3, "positions")


def test_tokens_are_reported_as_they_are_chosen(make_model: Make) -> None:
    seen: list[list[int]] = [[] for _ in PROMPTS]
    order = []

    def note(row: int, token: int) -> None:
        seen[row].append(token)
        order.append(len(seen[row]))

    result = generate_tokens(make_model(), PROMPTS, GREEDY, on_token=note)
    assert [tuple(tokens) for tokens in seen] == [one.tokens for one in result]
    assert order == sorted(order)


def test_a_model_in_training_stays_in_training(make_model: Make) -> None:
    model = make_model()
    model.train()
    model.final_norm.eval()
    modes = []
    generate_tokens(model, PROMPTS, GREEDY, on_token=lambda *_: modes.append(model.training))
    assert modes and not any(modes)
    assert model.training
    assert model.layers["0"].training
    assert not model.final_norm.training
    model.loss(torch.tensor([[1, 2, 3]]), torch.tensor([[2, 3, 4]])).sum().backward()
    assert model.embedding.word.weight.grad is not None


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *((kind, layout) for kind in ("gpt2", "llama") for layout in LAYOUTS),
        *(("mamba", layout) for layout in ("cp2", "tp2-sequence-pp2-vpp2")),
        ("hybrid", "tp2-pp2"),
    ],
)
def test_all_ranks_of_a_sharded_model_equal_one_rank(
    make_model: Make,
    make_stages: Callable[..., list[GPT]],
    worker_pool: WorkerPool,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    layout: str,
) -> None:
    drawn = SamplingParams(max_new_tokens=6, seed=3, top_p=0.9)
    settings = [GREEDY, drawn, GREEDY, drawn, GREEDY]  # some sequences end earlier than others
    expected = generate_tokens(make_model(kind, layers=4), PROMPTS, settings)
    cut = "sequence" in layout

    def on_ranks(mesh: Mesh) -> tuple[list, list, list]:
        model = make_stages(mesh, kind, sequence_parallel=cut)
        if model[-1].output is not None:
            model[-1].output.register_forward_hook(lambda _, given, out: made.append(len(out)))
        made: list[int] = []
        seen: list[tuple[int, int]] = []
        monkeypatch.setattr(engine, "PREFILL_TOKENS", 8)  # the prompts need several passes
        seeded = generate_tokens(model, PROMPTS, settings, on_token=lambda *one: seen.append(one))
        # The stages of a rank may be in any order.
        unseeded = generate_tokens(model[::-1], PROMPTS, SamplingParams(max_new_tokens=5))
        assert set(made) <= {1}  # one token of each row, never a whole prompt
        return seeded, unseeded, seen

    results = worker_pool.run_mesh(LAYOUTS[layout], on_ranks)
    for seeded, unseeded, seen in results:
        assert seeded == expected
        assert unseeded == results[0][1]
        assert len(seen) == sum(len(one.tokens) for one in expected)


def test_a_stage_caches_keys_and_values_of_its_own_layers(
    make_model: Make, worker_pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_ranks(mesh: Mesh) -> list[tuple[int, ...]]:
        made = []

        class Watched(engine.SlotCache):
            def __init__(self, *arguments: object, **settings: object) -> None:
                super().__init__(*arguments, **settings)
                made.append(self)

        monkeypatch.setattr(engine, "SlotCache", Watched)
        generate_tokens(make_model("llama", mesh=mesh), PROMPTS, GREEDY)
        return [cache.layers for cache in made]

    every = worker_pool.run_mesh(ParallelLayout(pp=2, dp=1), on_ranks)
    assert every == [[(0,)], [(1,)]]


def test_incomplete_stages_of_a_model_are_refused(make_model: Make) -> None:
    with pytest.raises(InferError, match="Linear is not a DecodingModel"):
        generate_tokens([torch.nn.Linear(2, 2)], PROMPTS, GREEDY)
    with pytest.raises(InferError, match="no stage"):
        generate_tokens([], PROMPTS, GREEDY)
    chunk = make_model()
    chunk.mesh = Mesh(ParallelLayout(pp=2, vpp=2, dp=1).resolve(2), 0)
    with pytest.raises(InferError, match=r"stages 0 of the model.* this rank has stages 0, 2"):
        generate_tokens(chunk, PROMPTS, GREEDY)
    with pytest.raises(InferError, match="has no encoder"):
        generate_tokens(make_model(), [[1]], GREEDY, sources=[[2]])


def test_no_prompts_give_no_continuations(make_model: Make) -> None:
    assert generate_tokens(make_model(), [], GREEDY) == []


@pytest.mark.parametrize(
    ("prompts", "names"),
    [
        ([[1], []], "prompt 2 is empty"),
        ([[1] * 48], "48 tokens and the model has 48 positions, which leaves none for a new"),
        ([[61]], "prompt 1 has token 61"),
        ([[1], [61, 1]], "prompt 2 has token 61"),
        ([[-1]], "token -1"),
    ],
)
def test_impossible_prompts_are_named(make_model: Make, prompts: list, names: str) -> None:
    with pytest.raises(InferError, match=names):
        generate_tokens(make_model(), prompts, GREEDY)


def test_settings_must_match_the_prompts(make_model: Make) -> None:
    with pytest.raises(InferError, match="got 5 prompts but settings for 2"):
        generate_tokens(make_model(), PROMPTS, [GREEDY, GREEDY])


def test_the_first_and_last_token_and_the_last_position_are_possible(make_model: Make) -> None:
    one = SamplingParams(max_new_tokens=3, temperature=0.0)
    first, last = generate_tokens(make_model(), [[0] * 47, [60]], one)
    assert (len(first.tokens), first.finish_reason) == (1, "positions")
    assert (len(last.tokens), last.finish_reason) == (3, "length")


@pytest.mark.parametrize("log_probs", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_with_nan_are_an_error_that_names_the_model(
    make_model: Make, log_probs: bool, temperature: float
) -> None:
    model = make_model()
    with torch.no_grad():
        model.final_norm.weight.fill_(float("nan"))
    params = SamplingParams(max_new_tokens=1, temperature=temperature)
    with pytest.raises(InferError, match="logits of the model contain NaN"):
        generate_tokens(model, [[1], [2, 3]], params, log_probs=log_probs)


def test_tokens_and_scores_of_an_imagined_device_are_zeros(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(t: torch.Tensor, assumed: Callable[[], list[float]]) -> list[float]:
        found = assumed()
        assert len(found) == t.numel()
        return found

    monkeypatch.setattr(engine, "read_numbers", read)
    one = SamplingParams(max_new_tokens=1, temperature=0.0)
    (found,) = generate_tokens(make_model(), [[1, 2]], one, log_probs=True)
    assert (found.tokens, found.log_probs) == ((0,), (0.0, 0.0))
    assert all(isinstance(score, float) for score in found.log_probs or ())
