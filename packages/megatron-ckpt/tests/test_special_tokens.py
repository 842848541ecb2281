import json

import pytest
from megatron_ckpt.formats.special_tokens import special_token_ids

ADDED = [{"id": 0, "content": "<|endoftext|>"}, {"id": 9, "content": "<s>"}]
TOKENIZER = {"added_tokens": ADDED, "model": {"vocab": {"a": 1, "</s>": 2, "<pad>": 3}}}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"eos_token": "</s>", "bos_token": {"content": "<s>"}, "pad_token": "<pad>"}, (9, 2, 3)),
        ({"eod_token": "<|endoftext|>"}, (None, 0, None)),
        ({"eod_token": "<|endoftext|>", "eos_token": "</s>"}, (None, 2, None)),
        ({"eos_token": "absent"}, (None, None, None)),
        ({}, (None, None, None)),
    ],
)
def test_special_token_ids_come_from_the_vocabulary(config, expected):
    files = {
        "tokenizer.json": json.dumps(TOKENIZER).encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }
    found = special_token_ids(files)
    assert tuple(found.values()) == expected
    assert list(found) == ["bos_token_id", "eos_token_id", "pad_token_id"]


def test_without_a_tokenizer_there_are_no_special_tokens():
    assert set(special_token_ids({}).values()) == {None}


def test_a_missing_token_is_not_the_empty_piece_of_a_vocabulary():
    files = {
        "tokenizer.json": json.dumps({"model": {"vocab": {"": 0, "</s>": 1}}}).encode(),
        "tokenizer_config.json": b'{"eos_token": "</s>"}',
    }
    assert tuple(special_token_ids(files).values()) == (None, 1, None)
