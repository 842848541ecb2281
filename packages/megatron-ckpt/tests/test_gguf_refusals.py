"""GGUF files that are unsupported, truncated or damaged."""

import contextlib
import struct
import sys

import numpy as np
import pytest
from fuzzing import fuzz, mutate_bytes
from megatron_ckpt import CheckpointError, import_hf
from megatron_ckpt.cli import main

from . import test_gguf
from .test_gguf import HIDDEN, SENTENCE_PIECE, tensors, write

family = test_gguf.family  # the fixture

EXPERTS = {"expert_count": np.uint32(8)}
WRONG = {
    "expert_count is 8": {"llama": EXPERTS},
    "sliding_window is 4": {"llama": {"attention.sliding_window": np.uint32(4)}},
    "expert_count is 8 and llama.attention.sliding_window is 4, which is not": {
        "llama": {**EXPERTS, "attention.sliding_window": np.uint32(4)}
    },
    "rope.dimension_count is 4, but heads have 8": {
        "llama": {"rope.dimension_count": np.uint32(4)}
    },
    r"head_count is \[4, 4\], not a number": {"llama": {"attention.head_count": [4, 4]}},
    "no metadata 'llama.block_count'": {"llama": {"block_count": None}},
    r"no tensor 'blk.1.ffn_gate.weight'": {
        "weights": {k: v for k, v in tensors().items() if k != "blk.1.ffn_gate.weight"}
    },
    r"no row uses tensor 'blk.2.attn_norm.weight'": {
        "weights": tensors() | {"blk.2.attn_norm.weight": np.ones(HIDDEN, np.float32)}
    },
    "architecture 'falcon'; supported architectures of GGUF files are gemma3, llama": {
        "name": "falcon"
    },
    "one of 3 parts; join them": {"more": {"split.count": np.uint32(3)}},
    "no metadata 'tokenizer.ggml.model'": {"tokenizer": False},
    "the tokenizer is of kind 'bert'": {"more": {"tokenizer.ggml.model": "bert"}},
    "no metadata 'tokenizer.ggml.scores'": {"more": {"tokenizer.ggml.model": "llama"}},
    "40 tokens but 2 scores": {"more": SENTENCE_PIECE | {"tokenizer.ggml.scores": [0.0, 1.0]}},
    "a token of 300 characters; the limit is 256": {
        "more": SENTENCE_PIECE | {"tokenizer.ggml.tokens": ["a" * 300, *map(str, range(39))]}
    },
    "tokenizer.ggml.tokens is not a list of str values": {
        "more": SENTENCE_PIECE | {"tokenizer.ggml.tokens": list(range(40))}
    },
    r"pre 'smolm' \(nearest: 'smollm'\)": {"more": {"tokenizer.ggml.pre": "smolm"}},
    "bos_token_id is 99, but the vocabulary has 40 tokens": {
        "more": {"tokenizer.ggml.bos_token_id": np.uint32(99)}
    },
    "40 tokens but 2 token types": {"more": {"tokenizer.ggml.token_type": [1, 1]}},
}


@pytest.mark.parametrize("words", WRONG)
def test_unsupported_files_are_refused_and_leave_nothing(tmp_path, words):
    path = write(tmp_path / "m.gguf", **WRONG[words])
    with pytest.raises(CheckpointError, match=words) as caught:
        import_hf(path, tmp_path / "run")
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert not list((tmp_path / "run").glob("iter_*"))


def test_a_truncated_file_is_refused_at_any_length(tmp_path):
    whole = write(tmp_path / "m.gguf").read_bytes()
    torn = tmp_path / "torn.gguf"
    for length in [*range(4, len(whole), 977), len(whole) - 1]:
        torn.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"torn\.gguf"):
            import_hf(torn, tmp_path / "run")
    assert not list((tmp_path / "run").glob("iter_*"))


def test_other_files_and_a_missing_package_are_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "m.bin").write_bytes(b"PK")
    assert main(["convert", "--from-hf", str(tmp_path / "m.bin"), str(tmp_path / "run")]) == 1
    assert "is not a GGUF file; use a GGUF file or the folder" in capsys.readouterr().err
    path = write(tmp_path / "m.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert main(["convert", "--from-hf", str(path), str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.endswith("need the package gguf; pip install 'megatron-ckpt[gguf]'")


def test_the_command_converts_a_file(tmp_path, capsys):
    path = write(tmp_path / "m.gguf")
    assert main(["convert", "--from-hf", str(path), str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.strip() == f"{tmp_path}/run/iter_0000000"


def header(*, version=3, tensors=0, keys=0, rest=b""):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


def key(name, kind):
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind)


def shape(*extents):
    name = struct.pack("<Q", 1) + b"t" + struct.pack("<I", len(extents))
    return name + struct.pack(f"<{len(extents)}Q", *extents) + struct.pack("<IQ", 0, 0)


MANY = bytes(9**7)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (header(tensors=10**12), "declares 1000000000000 tensors, but only 0 bytes follow"),
        (header(keys=2**63), "declares 9223372036854775808 metadata keys"),
        (header(keys=1, rest=key(b"k", 9) + struct.pack("<IQ", 4, 10**12)), "elements of metadata"),
        (header(keys=1, rest=key(b"k", 9) + struct.pack("<IQ", 8, 10**12)), "elements of metadata"),
        (
            header(keys=1, rest=key(b"k", 9) + struct.pack("<IQ", 0, 9**7) + bytes(9**7)),
            "ends|more",
        ),
        (header(keys=1, rest=key(b"k", 8) + struct.pack("<Q", 2**40)), "has 1099511627776 bytes"),
        (header(keys=1, rest=key(b"k", 9) + struct.pack("<IQIQ", 9, 1, 9, 1)), "type 9, which is"),
        (header(tensors=1, rest=shape(2**40)), "has shape .1099511627776., more than"),
        (header(tensors=1, rest=shape(*[2] * 9)), "has 9 dims; the limit is 4"),
        (header(tensors=1)[:20], "ends within metadata count"),
    ],
)
def test_counts_that_exceed_the_file_are_refused_at_once(tmp_path, content, words):
    path = tmp_path / "small.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        import_hf(path, tmp_path / "run")


class PlannedError(Exception):
    """Raised when an import reaches the first tensor to write."""


def test_damaged_headers_are_read_or_refused(tmp_path, fuzz_count):
    path = write(tmp_path / "m.gguf", more={"tokenizer.chat_template": "{{ messages }}"})
    whole = path.read_bytes()
    end = len(whole) - sum(weight.nbytes for weight in tensors().values())

    def mutate(rng, content):
        return mutate_bytes(rng, content[:end]) + content[end:]

    def stop(_):
        raise PlannedError

    def read(content):
        path.unlink()  # the former file may still be mapped
        path.write_bytes(content)
        with contextlib.suppress(PlannedError):
            import_hf(path, tmp_path / "run", on_start=stop)

    fuzz(read, [whole], CheckpointError, count=fuzz_count, mutate=mutate)
