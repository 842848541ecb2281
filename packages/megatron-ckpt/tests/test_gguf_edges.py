"""Values of GGUF files at the edge of what is read: types, numbers of tokens, empty pieces."""

import json

import numpy as np
import pytest
from megatron_ckpt import CheckpointError
from megatron_ckpt.formats.gguf import open_gguf

from . import test_gguf
from .test_gguf import HIDDEN, SENTENCE_PIECE, VOCAB, llama3_factors, tensors, write

family = test_gguf.family  # the fixture


def source(tmp_path, **settings):
    return open_gguf(write(tmp_path / "m.gguf", **settings))


def test_tensors_of_integers_are_refused_by_name(tmp_path):
    weights = tensors() | {"output_norm.weight": np.ones(HIDDEN, np.int32)}
    read = source(tmp_path, weights=weights).open_tensors("", {})
    words = "'output_norm.weight' has type I32, which the package gguf cannot dequantise"
    with pytest.raises(CheckpointError, match=words):
        read["model.norm.weight"]


@pytest.mark.parametrize("number", [-1, VOCAB])
def test_a_token_that_the_vocabulary_lacks_is_refused(tmp_path, number):
    more = {"tokenizer.ggml.padding_token_id": np.int32(number)}
    with pytest.raises(CheckpointError, match=f"padding_token_id is {number}, but the vocabulary"):
        source(tmp_path, more=more)


def test_tokens_are_found_behind_those_that_a_file_leaves_out(tmp_path):
    more = {
        "tokenizer.ggml.bos_token_id": None,
        "tokenizer.ggml.padding_token_id": np.uint32(VOCAB - 1),
    }
    found = json.loads(source(tmp_path, more=more).files["tokenizer/tokenizer_config.json"])
    assert found["pad_token"] == "<t>"
    assert not {"bos_token", "eos_token", "unk_token"} & found.keys()


def test_no_pair_has_an_empty_piece(tmp_path):
    words = ["", "a", "b", "ab", *(f"x{i}" for i in range(VOCAB - 4))]
    more = SENTENCE_PIECE | {
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [1] * 4 + [4] * (VOCAB - 4),
    }
    found = json.loads(source(tmp_path, more=more).files["tokenizer/tokenizer.json"])
    assert found["model"]["merges"] == [["a", "b"]]


def test_a_rotary_factor_has_the_four_decimals_that_a_float32_holds(tmp_path):
    factors = llama3_factors(128.0028)  # whose float32 is 128.002807
    found = source(
        tmp_path,
        llama={"rope.freq_base": np.float32(5e5)},
        weights=tensors() | {"rope_freqs.weight": factors},
    )
    assert found.config["rope_scaling"]["factor"] == 128.0028
