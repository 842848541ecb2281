"""Generation from a source text, compared with passes of the model without a cache in float64."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tokenizers
import torch
from megatron_ckpt import CheckpointStore, ModelRecord
from megatron_data import ByteTokenizer, load_tokenizer
from megatron_data.tokenizers import NullTokenizer
from megatron_infer import (
    InferError,
    SamplingParams,
    generate,
    generate_tokens,
    load_model,
    score_tokens,
)
from megatron_infer.cli import main
from megatron_infer.engine import batch as engine
from megatron_models import EncoderDecoder, EncoderDecoderConfig, Placement, find_kind, record_of
from megatron_parallel import Mesh, ParallelLayout, collect_shardings, parameter_views
from megatron_parallel.testing import WorkerPool

SOURCES = [[9, 4, 33, 2, 7], [1], [50, 51, 3, 4, 5, 6, 7, 8, 20], [12, 60]]
STARTS = [[1], [1, 17], [1], [1, 5, 44]]
GREEDY = SamplingParams(max_new_tokens=10, temperature=0.0)
POSITIONS = {
    "learned": {},
    "rope": {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "add_bias_linear": False,
        "num_query_groups": 2,
    },
}
LAYOUTS = {
    "tp2": ParallelLayout(tp=2, dp=1),
    "tp2-sequence": ParallelLayout(tp=2, dp=1),
    "pp2": ParallelLayout(pp=2, dp=1),
    "pp2-vpp2": ParallelLayout(pp=2, vpp=2, dp=1),
    "v": ParallelLayout(pp=2, vpp=2, dp=1, stage_mapping="v"),
    "tp2-sequence-pp2": ParallelLayout(tp=2, pp=2, dp=1),
}


def make(
    mesh: Mesh, positions: str = "learned", *, sequence_parallel: bool = False, vocab: int = 61
) -> list[EncoderDecoder]:
    """Returns all stages of this rank, with weights that make the output vary."""
    config = EncoderDecoderConfig(
        num_layers=4,
        encoder_num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        vocab_size=vocab,
        max_position_embeddings=24,
        make_vocab_size_divisible_by=16,
        init_method_std=0.4,
        untie_embeddings_and_output_weights=True,
        separate_decoder_embedding=True,
        **POSITIONS[positions],
    )
    placement = Placement(mesh, dtype=torch.float64, sequence_parallel=sequence_parallel)
    return find_kind("t5").build(config, placement, seed=4)  # type: ignore[return-value]


@torch.no_grad()
def without_cache(model: EncoderDecoder, source: list[int], start: list[int]) -> torch.Tensor:
    """Returns tokens by definition, and the log-probabilities of all of them but the first."""
    tokens = list(start)
    text = torch.tensor([source])
    for _ in range(GREEDY.max_new_tokens):
        logits = model(source=text, target=torch.tensor([tokens]))
        tokens.append(int(logits[-1, 0, : model.config.vocab_size].argmax()))
    known = model(source=text, target=torch.tensor([tokens]))[:-1, 0].log_softmax(-1)
    following = torch.tensor(tokens[1:]).unsqueeze(-1)
    return torch.tensor(tokens[len(start) :]), known.gather(-1, following).squeeze(-1)


@pytest.fixture(scope="module", params=list(POSITIONS))
def expected(request: pytest.FixtureRequest) -> tuple[str, list[tuple[int, ...]], list]:
    (model,) = make(Mesh.single(), request.param)
    found = [without_cache(model, *one) for one in zip(SOURCES, STARTS, strict=True)]
    tokens = [tuple(one.tolist()) for one, _ in found]
    assert len({token for one in tokens for token in one}) > 8  # not a constant
    assert tokens[0] != tokens[2]  # another source with the same start
    return request.param, tokens, [scores for _, scores in found]


@pytest.mark.parametrize("bound", [4096, 12, 1])
def test_batched_sources_equal_each_alone_without_cache(
    expected: tuple, bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    positions, tokens, scores = expected
    for name in ("PREFILL_TOKENS", "LOGITS_TOKENS"):
        monkeypatch.setattr(engine, name, bound)
    (model,) = make(Mesh.single(), positions)
    found = generate_tokens(model, STARTS, GREEDY, sources=SOURCES, log_probs=True)
    assert [one.tokens for one in found] == tokens
    whole = [[*start, *one] for start, one in zip(STARTS, tokens, strict=True)]
    again = score_tokens(model, whole, sources=SOURCES)
    for one, scored, truth in zip(found, again, scores, strict=True):
        for given in (one.log_probs, scored):
            made = torch.tensor(given, dtype=torch.float64)
            torch.testing.assert_close(made, truth, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("bound", "passes"), [(4096, 1), (12, 3)])
def test_the_encoder_and_its_keys_are_computed_once(
    bound: int, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 12 tokens of a prompt and its source in a pass, only the two shortest go together."""
    monkeypatch.setattr(engine, "PREFILL_TOKENS", bound)
    (model,) = make(Mesh.single())
    calls = {"encoder": 0, "kv": 0, "decoder": 0}

    def count(name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            calls[name] += 1

        return hook

    assert model.encoder is not None and model.decoder is not None
    model.encoder.register_forward_hook(count("encoder"))
    model.decoder.register_forward_hook(count("decoder"))
    for block in model.decoder.layers.values():
        block.cross_attention.kv.register_forward_hook(count("kv"))
    generate_tokens(model, STARTS, GREEDY, sources=SOURCES)
    steps = GREEDY.max_new_tokens - 1
    assert calls == {"encoder": passes, "kv": 4 * passes, "decoder": passes + steps}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_of_a_sharded_model_equal_one_rank(
    expected: tuple, worker_pool: WorkerPool, layout: str
) -> None:
    positions, tokens, _ = expected

    def on_ranks(mesh: Mesh) -> list[tuple[int, ...]]:
        stages = make(mesh, positions, sequence_parallel="sequence" in layout)
        made = generate_tokens(stages, STARTS, GREEDY, sources=SOURCES)
        return [one.tokens for one in made]

    for found in worker_pool.run_mesh(LAYOUTS[layout], on_ranks):
        assert found == tokens


class BeginsWithZero(ByteTokenizer):
    """A byte tokenizer with a begin-of-text token."""

    bos_id = 0


def test_a_text_is_generated_from_a_source() -> None:
    (model,) = make(Mesh.single(), vocab=257)
    tokenizer, sources = BeginsWithZero(), ["One.", "Another source"]
    params = SamplingParams(max_new_tokens=4, temperature=0.0)
    read = [tokenizer.encode(text) for text in sources]
    tokens = generate_tokens(model, [[0], [0, 65]], params, sources=read)
    completions = generate(model, tokenizer, ["", "A"], params, sources=sources)
    assert [one.tokens for one in completions] == [one.tokens for one in tokens]
    given = generate(model, ByteTokenizer(), ["", "A"], params, sources=sources, start_token=0)
    assert [one.tokens for one in given] == [one.tokens for one in tokens]
    with pytest.raises(InferError, match="no begin-of-text token"):
        generate(model, NullTokenizer(60), ["1"], params, sources=["2"])


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        (None, "give `sources`"),
        ([[1]], "got 4 prompts but 1 sources"),
        ([[1], [], [2], [3]], "source 2 has 0 tokens"),
        ([[1], [2] * 25, [2], [3]], "source 2 has 25 tokens; the model takes 1 to 24"),
        ([[1], [2], [2], [61]], "source 4 has token 61"),
    ],
)
def test_impossible_sources_are_named(sources: Sequence[Sequence[int]] | None, names: str) -> None:
    (model,) = make(Mesh.single())
    with pytest.raises(InferError, match=names):
        generate_tokens(model, STARTS, GREEDY, sources=sources)


def test_a_source_may_have_all_positions_of_the_model() -> None:
    (model,) = make(Mesh.single())
    one = SamplingParams(max_new_tokens=1, temperature=0.0)
    source = [index % 7 for index in range(24)]
    (found,) = generate_tokens(model, [[1]], one, sources=[source])
    with torch.no_grad():
        logits = model(source=torch.tensor([source]), target=torch.tensor([[1]]))
    assert found.tokens == (int(logits[-1, 0, :61].argmax()),)


# -- from a checkpoint ------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> str:
    """Returns a run with one checkpoint, whose tokenizer has a begin-of-text token."""
    (model,) = make(Mesh.single(), vocab=257)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    numbers = {letter: number for number, letter in enumerate(alphabet)}
    bytes_alone = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=numbers, merges=[]))
    bytes_alone.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = tokenizers.decoders.ByteLevel()
    bytes_alone.add_special_tokens(["<s>"])
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    bytes_alone.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    load_tokenizer(folder).save(tmp_path / "saved")
    CheckpointStore(tmp_path / "run").save(
        3,
        parameter_views(model, collect_shardings(model), Mesh.single()),
        model=ModelRecord(family=None, **record_of(model.config)),
        files={"tokenizer": tmp_path / "saved"},
    )
    return str(tmp_path / "run")


def test_the_stages_of_a_checkpoint_equal_the_whole_model(
    run: str, worker_pool: WorkerPool
) -> None:
    def written(mesh: Mesh) -> list:
        loaded = load_model(run, mesh=mesh, dtype=torch.float64)
        return generate(loaded.stages, loaded.tokenizer, ["", "A"], GREEDY, sources=["One.", "Two"])

    expected = written(Mesh.single())
    assert expected[0].tokens != expected[1].tokens
    for layout in (ParallelLayout(pp=2, dp=1), ParallelLayout(pp=2, vpp=2, dp=1)):
        assert worker_pool.run_mesh(layout, written) == [expected] * 2


def test_the_command_generates_from_sources(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["generate", "--load", run, "--max-new-tokens", "5", "--temperature", "0"]
    loaded = load_model(run)
    params = SamplingParams(max_new_tokens=5, temperature=0.0)
    one, two = generate(loaded.model, loaded.tokenizer, ["", ""], params, sources=["One.", "Two"])
    assert main([*common, "--source", "One."]) == 0
    assert capsys.readouterr().out == f"{one.text}\n"
    assert main([*common, "--source", "One.", "--source", "Two"]) == 0
    assert capsys.readouterr().out == f"--- 1 ---\n{one.text}\n--- 2 ---\n{two.text}\n"
    source = " ".join(map(str, loaded.tokenizer.encode("One.")))
    assert main([*common, "--prompt-tokens", "256", "--source-tokens", source]) == 0
    assert capsys.readouterr().out.split()[1:] == [str(token) for token in one.tokens]


def test_the_output_starts_with_the_token_that_the_model_names(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model,) = make(Mesh.single(), vocab=257)
    settings = b'{"decoder_start_token_id": 5}'
    CheckpointStore(tmp_path / "other").save(
        3,
        parameter_views(model, collect_shardings(model), Mesh.single()),
        model=ModelRecord(family=None, **record_of(model.config)),
        files={"tokenizer": tmp_path / "saved", "huggingface/generation_config.json": settings},
    )
    loaded = load_model(tmp_path / "other")
    params = SamplingParams(max_new_tokens=5, temperature=0.0)
    usual, own = (
        generate(loaded.model, loaded.tokenizer, [""], params, sources=["One."], start_token=start)
        for start in (None, 5)
    )
    assert usual[0].tokens != own[0].tokens
    common = ["--max-new-tokens", "5", "--temperature", "0", "--source", "One."]
    assert main(["generate", "--load", str(tmp_path / "other"), *common]) == 0
    assert capsys.readouterr().out == f"{own[0].text}\n"
    assert main(["generate", "--load", run, *common]) == 0
    assert capsys.readouterr().out == f"{usual[0].text}\n"


@pytest.mark.parametrize(
    ("words", "status", "names"),
    [
        (["generate"], 2, "--prompt --prompt-file --prompt-tokens is required, or --source"),
        (["generate", "--source-tokens", "1"], 2, "--source-tokens needs --prompt-tokens"),
        (["generate", "--source", "a", "--prompt-tokens", "1"], 2, "use --source-tokens"),
        (["generate", "--prompt", "a"], 1, "give `sources`"),
        (["generate", "--prompt", "a", "--source", "b", "--source", "c"], 1, "but 2 sources"),
        (["serve", "--port", "0"], 1, "kind 't5', which needs a source text"),
        (["chat"], 1, "use `megatron-infer generate --source TEXT`"),
    ],
)
def test_commands_name_what_a_model_with_an_encoder_needs(
    run: str, words: list[str], status: int, names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *others = words
    assert main([command, "--load", run, *others]) == status
    shown = capsys.readouterr().err.strip()
    assert names in shown
    assert "\n" not in shown
