"""Greedy continuations of imported models equal those of transformers' `generate`.

transformers writes a random model and a tokenizer, which are imported as a checkpoint and loaded
from that checkpoint alone. Both compute in float64, so that every token must be equal.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_ckpt import CheckpointStore, DistributedCoordinator, ModelRecord, import_hf
from megatron_infer import LoadedModel, SamplingParams, generate, generate_tokens, load_model
from megatron_infer.cli import main
from megatron_models import record_of
from megatron_parallel import Mesh, ParallelLayout, collect_shardings, parameter_views
from megatron_parallel.testing import WorkerPool

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

VOCABULARY, POSITIONS = 301, 64
GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": POSITIONS}
LLAMA = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": POSITIONS,
}
PROMPTS = ["a", "The whale swam", "Call me", "One two three four five six"]


def random_model(family: str) -> Any:
    torch.manual_seed(11)
    if family == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None, **GPT2
        )
    else:
        config = transformers.LlamaConfig(vocab_size=VOCABULARY, **LLAMA)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gain = name.endswith("weight") and ("norm" in name or "ln_" in name)
            parameter.normal_(1.0 if gain else 0.0, 0.3)
    return model.double().eval()


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer whose tokens are bytes, numbered in the order of the byte alphabet."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(params=["gpt2", "llama"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, LoadedModel]:
    """Returns a model in transformers, and the same loaded from its imported checkpoint."""
    theirs = random_model(request.param)
    theirs.save_pretrained(tmp_path / "theirs")
    write_tokenizer(tmp_path / "theirs")
    import_hf(tmp_path / "theirs", tmp_path / "ours")
    return theirs, load_model(tmp_path / "ours", dtype=torch.float64)


def their_greedy(model: Any, prompt: list[int], count: int) -> tuple[int, ...]:
    settings = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=count, eos_token_id=None, pad_token_id=0
    )
    tokens = torch.tensor([prompt])
    result = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), generation_config=settings
    )
    return tuple(result[0, len(prompt) :].tolist())


def test_greedy_continuations_equal_theirs_token_by_token(pair: tuple[Any, LoadedModel]) -> None:
    theirs, ours = pair
    prompts = ours.tokenizer.encode_batch(PROMPTS)
    params = SamplingParams(max_new_tokens=30, temperature=0.0)
    results = generate_tokens(ours.model, prompts, params)
    expected = [their_greedy(theirs, prompt, 30) for prompt in prompts]
    assert [one.tokens for one in results] == expected
    assert len({token for tokens in expected for token in tokens}) > 10  # not a constant


def test_text_equals_that_of_their_tokenizer(pair: tuple[Any, LoadedModel], tmp_path: Path) -> None:
    theirs, ours = pair
    params = SamplingParams(max_new_tokens=20, temperature=0.0)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "theirs" / "tokenizer.json")
    )
    for completion in generate(ours.model, ours.tokenizer, PROMPTS, params):
        prompt = tokenizer(completion.prompt)["input_ids"]
        tokens = their_greedy(theirs, prompt, 20)
        assert completion.text == tokenizer.decode(tokens, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_folder_of_theirs_generates_without_conversion(family: str, tmp_path: Path) -> None:
    theirs = random_model(family)
    theirs.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    ours = load_model(tmp_path, dtype=torch.float64)
    assert ours.name == tmp_path.name
    prompts = ours.tokenizer.encode_batch(PROMPTS)
    results = generate_tokens(ours.model, prompts, SamplingParams(30, temperature=0.0))
    assert [one.tokens for one in results] == [their_greedy(theirs, p, 30) for p in prompts]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_the_command_accepts_a_folder_of_theirs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = random_model("llama")
    theirs.save_pretrained(tmp_path)
    common = ["generate", "--load", str(tmp_path), "--dtype", "float64", "--temperature", "0"]
    prompt = [5, 7, 9]
    continued = their_greedy(theirs, prompt, 20)
    # There is no tokenizer: token ids in and out, up to the end token of its settings.
    assert main([*common, "--max-new-tokens", "20", "--prompt-tokens", "5 7 9"]) == 0
    assert capsys.readouterr().out == " ".join(map(str, (*prompt, *continued))) + "\n"
    stopping = next(i for i, token in enumerate(continued) if token not in continued[:i] and i > 2)
    settings = json.dumps({"eos_token_id": [continued[stopping], 300]})
    (tmp_path / "generation_config.json").write_text(settings)
    assert main([*common, "--max-new-tokens", "20", "--prompt-tokens", "5 7 9"]) == 0
    shown = " ".join(map(str, (*prompt, *continued[:stopping])))
    assert capsys.readouterr().out == shown + "\n"
    assert main([*common, "--prompt", "Call"]) == 1
    assert "holds no tokenizer" in capsys.readouterr().err
    write_tokenizer(tmp_path)
    assert main([*common, "--max-new-tokens", "8", "--prompt", "Call"]) == 0
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json")
    )
    expected = their_greedy(theirs, tokenizer("Call")["input_ids"], 8)
    text = tokenizer.decode(expected, clean_up_tokenization_spaces=False)
    assert capsys.readouterr().out == f"Call{text}\n"


def test_a_checkpoint_without_a_tokenizer_continues_token_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = random_model("gpt2")
    theirs.save_pretrained(tmp_path / "theirs")
    import_hf(tmp_path / "theirs", tmp_path / "ours")
    words = ["--load", str(tmp_path / "ours"), "--dtype", "float64", "--temperature", "0"]
    assert main(["generate", *words, "--max-new-tokens", "20", "--prompt-tokens", "5 7 9"]) == 0
    expected = (5, 7, 9, *their_greedy(theirs, [5, 7, 9], 20))
    assert capsys.readouterr().out == " ".join(map(str, expected)) + "\n"


def continue_from(mesh: Mesh, source: Path) -> list[tuple[int, ...]]:
    """Loads this rank's shard of a model of theirs and continues the prompts."""
    loaded = load_model(source, mesh=mesh, dtype=torch.float64)
    prompts = loaded.tokenizer.encode_batch(PROMPTS)
    params = SamplingParams(max_new_tokens=30, temperature=0.0)
    return [one.tokens for one in generate_tokens(loaded.model, prompts, params)]


def test_ranks_load_their_shards_of_a_folder_of_theirs(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    theirs = random_model("llama")
    theirs.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    prompts = load_model(tmp_path).tokenizer.encode_batch(PROMPTS)
    expected = [their_greedy(theirs, prompt, 30) for prompt in prompts]
    found = worker_pool.run_mesh(ParallelLayout(tp=2, pp=2, dp=1), continue_from, tmp_path)
    assert found == [expected] * 4


def cut_and_save(mesh: Mesh, source: Path, target: Path) -> list[tuple[int, ...]]:
    """Loads this rank's shard of a model, continues the prompts, and saves the shard."""
    loaded = load_model(source, mesh=mesh, dtype=torch.float64)
    views = parameter_views(loaded.model, collect_shardings(loaded.model), mesh)
    record = ModelRecord(family=loaded.checkpoint.model.family, **record_of(loaded.model.config))
    files = {"tokenizer": loaded.checkpoint.path / "tokenizer"}
    CheckpointStore(target, DistributedCoordinator()).save(1, views, model=record, files=files)
    params = SamplingParams(max_new_tokens=30, temperature=0.0)
    prompts = loaded.tokenizer.encode_batch(PROMPTS)
    return [one.tokens for one in generate_tokens(loaded.model, prompts, params)]


LAYOUTS = {
    "tp2": ParallelLayout(tp=2, dp=1),
    "pp2": ParallelLayout(pp=2, dp=1),
    "tp2-pp2": ParallelLayout(tp=2, pp=2, dp=1),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_checkpoints_of_several_ranks_generate_equally_on_one(
    pair: tuple[Any, LoadedModel],
    worker_pool: WorkerPool,
    layout: ParallelLayout,
    tmp_path: Path,
) -> None:
    theirs, ours = pair
    prompts = ours.tokenizer.encode_batch(PROMPTS)
    expected = [their_greedy(theirs, prompt, 30) for prompt in prompts]
    every = worker_pool.run_mesh(layout, cut_and_save, tmp_path / "ours", tmp_path / "cut")
    assert every == [expected] * layout.world_size
    whole = load_model(tmp_path / "cut", dtype=torch.float64)
    files = {piece.file for one in whole.checkpoint.tensors.values() for piece in one.pieces}
    assert len(files) == layout.world_size  # every rank has written its shard
    params = SamplingParams(max_new_tokens=30, temperature=0.0)
    assert [one.tokens for one in generate_tokens(whole.model, prompts, params)] == expected
