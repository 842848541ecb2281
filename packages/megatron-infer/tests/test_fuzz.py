"""Fuzz tests: foreign input is read or refused with this package's errors, in bounded resources."""

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from fuzzing import fuzz, mutate_bytes, mutate_json
from megatron_ckpt import Checkpoint, CheckpointError, CheckpointStore, ModelRecord, find_checkpoint
from megatron_data import ByteTokenizer, DataError
from megatron_infer import InferError, SamplingParams, ServerSettings, load_model
from megatron_infer._command import CommandError
from megatron_infer.cli.main import build_parser
from megatron_infer.cli.options import sampling_params
from megatron_infer.server.fields import RequestError, parse_request, request_schema
from megatron_models import GPT, ConfigError, record_of
from megatron_parallel import LayoutError, Mesh, collect_shardings, parameter_views

SCHEMA = request_schema(64)
BODIES = [
    b'{"prompts": ["Hello world"], "tokens_to_generate": 1}',
    json.dumps(
        {
            "prompts": ["One", "Two \u00e9\u4e16", ""],
            "tokens_to_generate": 64,
            "logprobs": True,
            "temperature": 0.8,
            "top_k": 40,
            "top_p": 0.0,
            "add_BOS": True,
            "random_seed": 2**53 - 1,
        },
        ensure_ascii=False,
    ).encode(),
]


@pytest.mark.parametrize("mutate", [mutate_json, mutate_bytes])
def test_damaged_bodies_are_refused(fuzz_count: int, mutate: Callable[..., bytes]) -> None:
    def read(body: bytes) -> None:
        try:
            parse_request(body, SCHEMA)
        except RequestError as error:
            assert error.status == 400
            raise

    tally = fuzz(read, BODIES, RequestError, count=fuzz_count, mutate=mutate, megabytes=64)
    assert tally.refused["RequestError"] > fuzz_count / 4


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompts": [' + b'"a",' * 250_000 + b'"a"]}',
        b'{"prompts": [' + b"[]," * 340_000 + b"[]]}",
        b"{" + b",".join(b'"%d":0' % number for number in range(100_000)) + b"}",
        b'{"prompts": ["' + b"\\u0000" * 170_000 + b'"], "x": 0}',
        b'{"a":' * 200_000,
        b"[" * 1_000_000,
        b'{"prompts": ["a"], "prompts": ["a"]}',
        b'{"prompts": ["a"], "x": {"y": 1, "y": 2}}',
        b'\xff\xfe{\x00"\x00p\x00"\x00',
        b'\xef\xbb\xbf{"prompts": ["a"]}',
        b'{"prompts": ["\xed\xa0\x80"]}',
    ],
    ids=lambda body: repr(body[:20]),
)
def test_bodies_of_the_largest_size_take_bounded_resources(body: bytes) -> None:
    def read(content: bytes) -> None:
        parse_request(content, SCHEMA)

    assert len(body) <= ServerSettings().max_body_bytes
    fuzz(read, [BODIES[0]], RequestError, count=1, mutate=lambda rng, _: body, megabytes=256)


WORDS = [
    "9" * 309,
    "9" * 4300,
    "9" * 4301,
    "-" + "9" * 400,
    "1e999",
    "nan",
    "inf",
    "-inf",
    "1e-400",
]
WORDS += ["", " ", "0x1", "1_0", "\u0663", "1.5", "-1", "0", "1", str(2**63), "1e5"]


@pytest.mark.parametrize("word", WORDS, ids=lambda word: ascii(word[:8]) + str(len(word)))
def test_numbers_on_the_command_line_are_taken_or_refused(word: str) -> None:
    parser = build_parser()
    for setting in dataclasses.fields(SamplingParams):
        words = ["generate", "--load", "x", "--prompt", "x", f"{setting.metadata['flag']}={word}"]
        try:
            sampling_params(parser.parse_args(words))
        except (CommandError, InferError) as error:
            assert "\n" not in str(error)
    for setting in dataclasses.fields(ServerSettings):
        if setting.metadata.get("flag") and setting.type is int:
            try:
                given = parser.parse_args(
                    ["serve", "--load", "x", f"{setting.metadata['flag']}={word}"]
                )
                made = ServerSettings(**{setting.name: getattr(given, setting.name)})
            except (CommandError, InferError) as error:
                assert "\n" not in str(error)
            else:
                assert made.threads < 2000


def test_damaged_model_records_are_refused(
    make_model: Callable[..., GPT],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fuzz_count: int,
) -> None:
    model = make_model("llama", vocab_size=257)
    ByteTokenizer().save(tmp_path / "tokenizer")
    CheckpointStore(tmp_path / "run").save(
        1,
        parameter_views(model, collect_shardings(model), Mesh.single()),
        model=ModelRecord(family=None, **record_of(model.config)),
        files={"tokenizer": tmp_path / "tokenizer"},
    )
    whole = find_checkpoint(tmp_path / "run")

    def read(config: bytes) -> None:
        record = ModelRecord("gpt", None, 1, json.loads(config))
        forged = Checkpoint(whole.path, dataclasses.replace(whole.manifest, model=record))
        monkeypatch.setattr("megatron_infer.load.find_checkpoint", lambda *_: forged)
        load_model(tmp_path / "run")

    tables = {**model.config.to_dict(), "max_position_embeddings": 10**12}
    with pytest.raises(InferError, match=r"needs \d+\.\d GiB .*, more than cpu has free"):
        read(json.dumps(tables).encode())
    refusals = (CheckpointError, ConfigError, DataError, InferError, LayoutError)
    seed = json.dumps(model.config.to_dict()).encode()
    tally = fuzz(read, [seed], refusals, count=fuzz_count, mutate=mutate_objects)
    assert tally.refused


def mutate_objects(rng: random.Random, content: bytes) -> bytes:
    """Returns a mutated object that a manifest can hold, without NaN and invalid text."""
    while True:
        try:
            damaged = mutate_json(rng, content)
            found = json.loads(damaged)
            json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
            if isinstance(found, dict):
                return damaged
        except (ValueError, RecursionError):
            continue
