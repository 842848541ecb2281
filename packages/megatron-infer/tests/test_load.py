from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron_ckpt import (
    CheckpointError,
    CheckpointStore,
    CorruptCheckpointError,
    ModelRecord,
    export_hf,
)
from megatron_data import ByteTokenizer, train_bpe
from megatron_data.tokenizers import NullTokenizer
from megatron_infer import InferError, SamplingParams, generate_tokens, load_model
from megatron_infer.defaults import GenerationDefaults
from megatron_models import GPT, ConfigError
from megatron_parallel import LayoutError, Mesh, ParallelLayout, collect_shardings, parameter_views
from megatron_parallel.sharding import collect_states
from megatron_parallel.testing import WorkerPool

Save = Callable[..., GPT]
KINDS_GPT2 = {
    "num_attention_heads": 4,
    "vocab_size": 257,
    "max_position_embeddings": 48,
    "make_vocab_size_divisible_by": 16,
}


@pytest.fixture
def save(make_model: Callable[..., GPT], tmp_path: Path) -> Save:
    """Returns a function that saves a tiny model like the trainer, in ``tmp_path / "run"``."""

    def save(
        kind: str = "gpt2",
        *,
        iteration: int = 5,
        dtype: torch.dtype = torch.float32,
        tokenizer: ByteTokenizer | NullTokenizer | None = ByteTokenizer(),  # noqa: B008
        record: bool = True,
        config: dict | None = None,
        layers: int = 2,
    ) -> GPT:
        model = make_model(kind, vocab_size=257, dtype=dtype, layers=layers)
        views = parameter_views(model, collect_shardings(model), Mesh.single())
        state = {"trainer": {"iteration": iteration}, **views}
        weight = views["embedding.word.weight"]
        state["embedding.word.weight.exp_avg"] = [
            view._replace(tensor=torch.ones_like(view.tensor)) for view in weight
        ]
        files = {}
        if tokenizer is not None:
            tokenizer.save(tmp_path / "tokenizer")
            files = {"tokenizer": tmp_path / "tokenizer"}
        CheckpointStore(tmp_path / "run").save(
            iteration,
            state,
            model=ModelRecord("gpt", None, 1, config or model.config.to_dict()) if record else None,
            files=files,
        )
        return model

    return save


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_checkpoint_alone_rebuilds_model_and_tokenizer(
    save: Save, tmp_path: Path, kind: str
) -> None:
    model = save(kind)
    loaded = load_model(tmp_path / "run")
    tokens = torch.tensor([[84, 104, 101, 32]])
    assert torch.equal(loaded.model(tokens), model(tokens))
    assert not loaded.model.training
    assert loaded.tokenizer.encode("The ") == tokens[0].tolist()
    assert loaded.checkpoint.iteration == 5


def test_a_folder_of_hugging_face_is_one_model_with_its_tokenizer(
    save: Save, tmp_path: Path
) -> None:
    tokenizer = train_bpe(["a"], 257)
    model = save(tokenizer=tokenizer)
    folder = export_hf(tmp_path / "run", tmp_path / "theirs", family="gpt2")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    seen: list[tuple[int, int]] = []
    loaded = load_model(folder, progress=lambda done, total: seen.append((done, total)))
    tokens = torch.tensor([tokenizer.encode("The ")])
    with torch.no_grad():  # the padding of the vocabulary differs
        torch.testing.assert_close(loaded.model(tokens)[..., :257], model(tokens)[..., :257])
    assert loaded.tokenizer.encode("The ") == tokens[0].tolist()
    assert loaded.name == "theirs" and loaded.defaults.adds_special_tokens
    weights = sum(tensor.numel() for tensor in model.parameters()) - 15 * 32  # without padding
    assert seen[-1] == (4 * weights, 4 * weights)
    with pytest.raises(InferError, match=r"without iterations; leave out iteration 5$"):
        load_model(folder, iteration=5)
    assert load_model(folder, tokenizer=None).tokenizer is None
    (folder / "tokenizer.json").write_text("{")
    words = f"{folder}.*; give another tokenizer with --tokenizer-model and --tokenizer-type"
    with pytest.raises(InferError, match=words):
        load_model(folder)


def test_biases_of_experts_come_with_the_weights(
    make_model: Callable[..., GPT], tmp_path: Path
) -> None:
    shape = replace(
        make_model("llama", vocab_size=257).config,
        num_experts=4,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
    )
    model = GPT(shape, Mesh.single())
    with torch.no_grad():
        for state in collect_states([model]).values():
            state.value.copy_(torch.tensor([0.5, -0.5, 0.3, 0.0]))
    views = parameter_views(model, collect_shardings(model), Mesh.single())
    store = CheckpointStore(tmp_path / "run")
    store.save(1, dict(views), model=ModelRecord("gpt", None, 1, shape.to_dict()))
    loaded = load_model(tmp_path / "run", tokenizer=None)
    tokens = torch.tensor([[84, 104, 101, 32]])
    assert torch.equal(loaded.model(tokens), model(tokens))
    assert not torch.equal(loaded.model(tokens), GPT(shape, Mesh.single())(tokens))


def test_a_run_gives_its_newest_checkpoint_or_the_one_named(save: Save, tmp_path: Path) -> None:
    save(iteration=5)
    save(iteration=9)
    assert load_model(tmp_path / "run").checkpoint.iteration == 9
    assert load_model(tmp_path / "run", iteration=5).checkpoint.iteration == 5
    assert load_model(tmp_path / "run" / "iter_0000005").checkpoint.iteration == 5


def test_weights_are_converted_to_the_precision_asked_for(save: Save, tmp_path: Path) -> None:
    model = save(dtype=torch.bfloat16)
    loaded = load_model(tmp_path / "run", dtype=torch.float64).model
    for ours, saved in zip(loaded.parameters(), model.parameters(), strict=True):
        assert ours.dtype == torch.float64
        assert torch.equal(
            ours[:257] if ours.shape[0] > 257 else ours, saved[: len(ours)].double()[:257]
        )


def test_rows_that_pad_the_vocabulary_are_zero(
    save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save()
    with monkeypatch.context() as patch:  # memory without a value is NaN
        patch.setattr(torch, "empty_like", lambda t, **more: torch.full_like(t, torch.nan, **more))
        weight = load_model(tmp_path / "run").model.embedding.word.weight
    assert weight.shape[0] == 272
    assert weight[257:].count_nonzero() == 0 and weight[:257].isfinite().all()


def test_progress_ends_with_all_weights(save: Save, tmp_path: Path) -> None:
    save()
    seen = []
    load_model(tmp_path / "run", progress=lambda done, total: seen.append((done, total)))
    dones, totals = zip(*seen, strict=True)
    assert list(dones) == sorted(dones)
    assert 0.9 < dones[-1] / totals[0] <= 1.0


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_each_rank_reads_only_its_shards(
    save: Save, make_model: Callable[..., GPT], worker_pool: WorkerPool, tmp_path: Path, kind: str
) -> None:
    save(kind, dtype=torch.float64)

    def on_ranks(mesh: Mesh) -> tuple[bool, int, int]:
        seen: list[tuple[int, int]] = []
        loaded = load_model(
            tmp_path / "run",
            mesh=mesh,
            dtype=torch.float64,
            progress=lambda done, total: seen.append((done, total)),
        )
        model = make_model(kind, vocab_size=257, mesh=mesh)  # drawn from the same seed
        views = parameter_views(loaded.model, collect_shardings(model), mesh)
        wanted = parameter_views(model, collect_shardings(model), mesh)
        equal = [
            torch.equal(view.tensor, other.tensor)
            for name in wanted
            for view, other in zip(views[name], wanted[name], strict=True)
        ]
        return all(equal) and len(equal) > 5, *seen[-1]

    everything = []
    load_model(tmp_path / "run", progress=lambda done, total: everything.append(done))
    for layout in (ParallelLayout(pp=2, dp=1), ParallelLayout(tp=2, pp=2, dp=1)):
        for equal, done, total in worker_pool.run_mesh(layout, on_ranks):
            assert equal
            assert done == total < everything[-1]


def test_a_stage_detects_the_checkpoint_of_another_model(
    save: Save, worker_pool: WorkerPool, tmp_path: Path
) -> None:
    model = save("gpt2")
    more = model.config.to_dict() | {"num_layers": 4}
    save("gpt2", iteration=6, config=more)

    def on_ranks(mesh: Mesh) -> str:
        with pytest.raises(CheckpointError) as caught:
            load_model(tmp_path / "run", mesh=mesh)
        return str(caught.value)

    for error in worker_pool.run_mesh(ParallelLayout(pp=2, dp=1), on_ranks):
        assert "the checkpoint has no tensor 'layers.2." in error


def test_ranks_that_find_different_checkpoints_are_refused(
    save: Save, worker_pool: WorkerPool, tmp_path: Path
) -> None:
    save(iteration=5)
    save(iteration=9)

    def on_ranks(mesh: Mesh) -> str:
        with pytest.raises(LayoutError) as caught:
            load_model(tmp_path / "run", iteration=(5, 9)[mesh.rank], mesh=mesh)
        return str(caught.value)

    for error in worker_pool.run_mesh(ParallelLayout(pp=2, dp=1), on_ranks):
        assert "iteration 5 with digest" in error and "iteration 9 with digest" in error


@pytest.mark.parametrize("stage_mapping", ["loop", "v"])
def test_a_rank_with_several_stages_loads_and_generates(
    save: Save, worker_pool: WorkerPool, tmp_path: Path, stage_mapping: str
) -> None:
    greedy = SamplingParams(max_new_tokens=5, temperature=0.0)
    expected = generate_tokens(save(layers=4, dtype=torch.float64), [[5, 7]], greedy)

    def on_ranks(mesh: Mesh) -> tuple[int, list]:
        loaded = load_model(tmp_path / "run", mesh=mesh, dtype=torch.float64)
        return len(loaded.stages), generate_tokens(loaded.stages, [[5, 7]], greedy)

    layout = ParallelLayout(pp=2, vpp=2, dp=1, stage_mapping=stage_mapping)
    assert worker_pool.run_mesh(layout, on_ranks) == [(2, expected)] * 2


def test_missing_parts_of_a_checkpoint_are_named(save: Save, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing-here"):
        load_model(tmp_path / "nothing-here")
    save(iteration=1, tokenizer=None)
    with pytest.raises(InferError, match=r"no tokenizer; give one with --tokenizer-model .*=None"):
        load_model(tmp_path / "run")
    save(iteration=2, record=False)
    with pytest.raises(InferError, match="no record of its model"):
        load_model(tmp_path / "run")
    save(iteration=3, tokenizer=NullTokenizer(1000))
    with pytest.raises(InferError, match=r"1001 tokens, but the model has 257"):
        load_model(tmp_path / "run", iteration=3)
    save(iteration=4, config={"num_layer": 2})
    with pytest.raises(ConfigError, match="num_layer"):
        load_model(tmp_path / "run", iteration=4)
    with pytest.raises(CheckpointError, match="8"):
        load_model(tmp_path / "run", iteration=8)


def test_a_flipped_bit_in_any_file_of_the_tokenizer_is_found(save: Save, tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    save()
    folder = CheckpointStore(tmp_path / "run").path(5) / "tokenizer"
    for file in (folder / "chat_template.jinja", folder / "megatron_tokenizer.json"):
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(CorruptCheckpointError, match=f"{file.name}: bytes 0 to .* changed"):
            load_model(tmp_path / "run")
        file.write_bytes(whole)
    load_model(tmp_path / "run")


def test_a_file_that_was_put_beside_the_tokenizer_is_not_read(save: Save, tmp_path: Path) -> None:
    save()
    folder = CheckpointStore(tmp_path / "run").path(5) / "tokenizer"
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(CorruptCheckpointError, match=r"chat_template.jinja is not in the manifest"):
        load_model(tmp_path / "run")


def test_a_model_record_allocates_no_memory_without_tensors(save: Save, tmp_path: Path) -> None:
    config = {**KINDS_GPT2, "hidden_size": 4 << 20, "num_layers": 50_000}
    save(config=config)
    with pytest.raises(CheckpointError, match=r"no tensor|has shape"):
        load_model(tmp_path / "run")
    save(iteration=6, config={**config, "num_layers": 10**9})
    with pytest.raises(ConfigError, match="num_layers is 1000000000, more than 100000"):
        load_model(tmp_path / "run")


def test_a_model_whose_experts_choose_tokens_is_refused_before_its_weights_are_read(
    save: Save, tmp_path: Path
) -> None:
    choice = {"num_experts": 4, "moe_router_expert_choice": True, "moe_router_pre_softmax": True}
    save(config={**KINDS_GPT2, **choice, "hidden_size": 32, "num_layers": 2})
    with pytest.raises(InferError, match="cannot generate: moe_router_expert_choice lets experts"):
        load_model(tmp_path / "run")


def test_ranks_that_do_not_divide_the_heads_are_refused(
    save: Save, tmp_path: Path, worker_pool: WorkerPool
) -> None:
    save()

    def load(mesh: Mesh) -> str:
        with pytest.raises(LayoutError) as caught:
            load_model(tmp_path / "run", mesh=mesh)
        return str(caught.value)

    for message in worker_pool.run_mesh(ParallelLayout(tp=3, dp=1), load):
        assert "tp 3 cannot cut num_attention_heads" in message and "use tp " in message


def test_a_checkpoint_without_a_tokenizer_takes_token_ids(save: Save, tmp_path: Path) -> None:
    model = save(tokenizer=None)
    loaded = load_model(tmp_path / "run", tokenizer=None)
    assert loaded.tokenizer is None
    tokens = torch.tensor([[84, 104, 101, 32]])
    assert torch.equal(loaded.model(tokens), model(tokens))
    assert loaded.stop_tokens == frozenset()


def test_a_given_tokenizer_replaces_the_stored_one(save: Save, tmp_path: Path) -> None:
    save(tokenizer=NullTokenizer(100))
    given = ByteTokenizer()
    loaded = load_model(tmp_path / "run", tokenizer=given)
    assert loaded.tokenizer is given
    assert loaded.stop_tokens == {given.eod_id}
    with pytest.raises(InferError, match=r"1001 tokens, but the model has 257"):
        load_model(tmp_path / "run", tokenizer=NullTokenizer(1000))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_a_model_that_does_not_fit_is_refused_with_its_size(
    save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    model = save()

    def full(*arguments: object, **settings: object) -> None:
        raise error

    monkeypatch.setattr(GPT, "to_empty", full)
    monkeypatch.setattr(torch.Tensor, "element_size", lambda tensor: 2**20)  # as if it were large
    elements = sum(each.numel() for each in (*model.parameters(), *model.buffers()))
    message = f"needs {elements / 1024:.1f} GiB for parameters of torch.float32 and tables "
    with pytest.raises(InferError, match=message + "of 48 positions, more than cpu has free"):
        load_model(tmp_path / "run")

    def broken(*arguments: object, **settings: object) -> None:
        raise RuntimeError("another reason")

    monkeypatch.setattr(GPT, "to_empty", broken)
    with pytest.raises(RuntimeError, match="another reason"):
        load_model(tmp_path / "run")


def test_stop_and_start_tokens_are_those_of_the_model_and_then_of_its_tokenizer(
    save: Save, tmp_path: Path
) -> None:
    save()
    loaded = load_model(tmp_path / "run")
    assert loaded.name == "run, iteration 5"
    assert loaded.stop_tokens == {ByteTokenizer().eod_id}
    assert loaded.start_token is None
    settings = GenerationDefaults(stop_tokens=frozenset({3}), start_token=0)
    own = replace(loaded, defaults=settings)
    assert own.stop_tokens == {3, ByteTokenizer().eod_id}
    assert own.start_token == 0
    assert replace(own, tokenizer=None).stop_tokens == {3}
    assert replace(own, tokenizer=None).start_token == 0
    assert replace(loaded, tokenizer=None).start_token is None
