"""Settings beside the weights: each is applied, or named in a note, or has no effect."""

import json
from typing import Any

import pytest
from megatron_infer import InferError, SamplingParams
from megatron_infer.defaults import GenerationDefaults, read_defaults
from megatron_infer.server.fields import parse_request, request_defaults, request_schema


def read(**files: Any) -> GenerationDefaults:
    """Reads the defaults of ``generation`` and ``config``."""
    content = {
        f"huggingface/{name}": json.dumps(files[key]).encode()
        for key, name in (("generation", "generation_config.json"), ("config", "config.json"))
        if key in files
    }
    return read_defaults(list(content), content.__getitem__, "folder")


def test_a_model_without_settings_has_no_defaults() -> None:
    assert read() == GenerationDefaults()
    assert not read().adds_special_tokens
    plain = read(config={"hidden_size": 8, "max_length": 20})
    assert plain == GenerationDefaults(adds_special_tokens=True)


def test_token_0_may_end_a_text_and_a_negative_number_is_no_token() -> None:
    assert read(generation={"eos_token_id": 0}).stop_tokens == {0}
    assert read(generation={"eos_token_id": [0, -1, 7]}).stop_tokens == {0, 7}
    assert read(generation={"eos_token_id": -1}).stop_tokens == frozenset()


def test_one_file_counts_as_a_whole() -> None:
    config = {"eos_token_id": [5, 6], "do_sample": True, "repetition_penalty": 1.1}
    alone = read(config=config)
    assert alone.stop_tokens == {5, 6} and alone.params["top_k"] == 50
    assert "config.json: not applied: repetition_penalty 1.1" in alone.notes
    both = read(config=config, generation={"eos_token_id": 6})
    assert both.stop_tokens == {6} and both.params == {}
    (note,) = both.notes
    assert note == (
        "generation_config.json: not applied: eos_token_id [5, 6] of config.json "
        "(generation_config.json comes first)"
    )
    for own, other in ((6, 6), (6, [6, 7]), ([], 6)):
        repeated = read(config={"eos_token_id": own}, generation={"eos_token_id": other})
        assert repeated.notes == ()
    inner = read(config={"text_config": {"eos_token_id": [1, 106]}})
    assert inner.stop_tokens == {1, 106}


@pytest.mark.parametrize(
    ("generation", "start"),
    [
        ({"decoder_start_token_id": 3, "bos_token_id": 1}, 3),
        ({"bos_token_id": 1}, 1),
        ({}, 0),
    ],
)
def test_the_output_for_a_source_starts_as_in_transformers(
    generation: dict[str, int], start: int
) -> None:
    assert read(generation=generation, config={"decoder_start_token_id": 0}).start_token == start


def test_options_come_before_the_settings_of_the_model() -> None:
    found = read(generation={"do_sample": True, "temperature": 0.6, "max_new_tokens": 9})
    assert found.sampling_params(top_k=7, seed=1) == SamplingParams(9, 0.6, 7, 1.0, 1)
    assert found.sampling_params(temperature=0.0, max_new_tokens=3).temperature == 0.0
    assert found.notes == (
        "generation_config.json: applied temperature 0.6, top_k 50, top_p 1.0, max_new_tokens 9",
    )


def test_sampling_fields_count_only_with_do_sample() -> None:
    fields = {"temperature": 0.6, "top_p": 0.9, "min_p": 0.1}
    assert read(generation={"do_sample": False}).params == {"temperature": 0.0}
    without = read(generation=fields)
    assert without.params == {}
    assert without.notes[0].endswith(
        "temperature 0.6 (do_sample is not true); top_p 0.9 (do_sample is not true); "
        "min_p 0.1 (do_sample is not true)"
    )
    assert read(generation={**fields, "do_sample": True}).notes[1].endswith("applied: min_p 0.1")


def test_what_has_an_effect_elsewhere_is_named() -> None:
    found = read(generation={"num_beams": 4, "no_repeat_ngram_size": 3, "chat_format": "raw"})
    assert found.notes == (
        "generation_config.json: not applied: num_beams 4; no_repeat_ngram_size 3; "
        'chat_format "raw" (unknown)',
    )
    after = read(generation={"top_k": 50, "num_beams": 4})  # the first one has no effect
    assert after.notes == ("generation_config.json: not applied: num_beams 4",)
    neutral = {"num_beams": 1, "repetition_penalty": 1.0, "use_cache": True, "max_length": 20}
    assert read(generation=neutral).notes == ()


NEUTRAL = {
    **dict.fromkeys(("temperature", "top_p", "typical_p", "guidance_scale"), 1.0),
    **dict.fromkeys(("min_p", "epsilon_cutoff", "eta_cutoff", "penalty_alpha"), 0.0),
    **dict.fromkeys(("length_penalty", "repetition_penalty", "encoder_repetition_penalty"), 1.0),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), 1),
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size"), 0),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "diversity_penalty"), 0),
    **dict.fromkeys(("early_stopping", "token_healing"), False),
    "top_k": 50,
    "max_length": 20,
}


def test_values_without_effect_are_not_named_and_others_are() -> None:
    assert read(generation=NEUTRAL).notes == ()
    others = {name: value + 2 for name, value in NEUTRAL.items()}
    (note,) = read(generation=others).notes
    named = [one.split()[0] for one in note.partition("not applied: ")[2].split("; ")]
    assert named == list(NEUTRAL)


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ([1], "generation_config.json of folder is not a JSON object"),
        ({"eos_token_id": "</s>"}, 'eos_token_id is "</s>", not a token id or a list'),
        ({"eos_token_id": [1, True]}, "eos_token_id is"),
        ({"do_sample": True, "top_k": "all"}, 'top_k is "all", not a number'),
        ({"do_sample": True, "top_p": 1.5}, r"folder: top_p must lie in \(0, 1\]"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"do_sample": True, "top_k": True}, "top_k is true, not a number"),
        ({"do_sample": True, "top_k": 2.5}, "top_k is 2.5, not a number"),
        ({"do_sample": True, "temperature": "1"}, 'temperature is "1", not a number'),
    ],
)
def test_wrong_values_are_refused_by_name(generation: Any, message: str) -> None:
    with pytest.raises(InferError, match=message):
        read(generation=generation)


def test_requests_to_a_server_start_from_the_settings_of_the_model() -> None:
    found = read(generation={"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.8})
    schema = request_schema(64, request_defaults(found.params, starts_with_bos=True))

    def request(**fields: Any) -> Any:
        return parse_request(json.dumps({"prompts": ["a"], **fields}).encode(), schema)

    plain = request()
    assert (plain.temperature, plain.top_k, plain.top_p, plain.add_BOS) == (0.6, 20, 0.8, True)
    assert (request(top_k=3).top_k, request(top_k=3).top_p) == (3, 0.0)
    assert (request(top_p=0.5).top_k, request(temperature=2).temperature) == (0, 2.0)
    assert schema["properties"]["temperature"]["default"] == 0.6
    greedy = read(generation={"do_sample": False}).params
    assert request_defaults(greedy, starts_with_bos=False) == {"top_k": 1}
    all_tokens = {"temperature": 0.5, "top_k": 5, "top_p": 1.0}
    expected = {"temperature": 0.5, "top_k": 5}
    assert request_defaults(all_tokens, starts_with_bos=False) == expected


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000])
def test_a_file_that_is_no_json_is_refused_by_name(content: bytes) -> None:
    name = "huggingface/generation_config.json"
    with pytest.raises(InferError, match=r"generation_config\.json of folder is not JSON"):
        read_defaults([name], lambda _: content, "folder")


def test_null_is_the_same_as_a_missing_field() -> None:
    found = read(generation={"do_sample": True, "top_k": None, "num_beams": None})
    assert found.params == {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
    assert read(generation={"eos_token_id": None}).stop_tokens == frozenset()


@pytest.mark.parametrize("name", ["decoder", "generator", "text_config"])
def test_settings_of_an_inner_model_count_unless_the_outer_one_has_them(name: str) -> None:
    inner = {name: {"eos_token_id": 5, "num_beams": 4}}
    assert read(config=inner).stop_tokens == {5}
    assert read(config=inner).notes == ("config.json: not applied: num_beams 4",)
    assert read(config={**inner, "eos_token_id": 6}).stop_tokens == {6}
    assert read(config={name: [7]}).stop_tokens == frozenset()  # not an object


def test_a_long_value_in_a_note_is_cut_after_60_characters() -> None:
    for letters, shown in ((58, '"' + "y" * 58 + '"'), (59, '"' + "y" * 59 + "...")):
        (note,) = read(generation={"stop_strings": "y" * letters}).notes
        assert note == f"generation_config.json: not applied: stop_strings {shown}"


@pytest.mark.parametrize(("letters", "shown"), [(58, "x" * 58 + '"'), (59, "x" * 59 + "...")])
def test_a_value_in_a_note_has_at_most_60_characters(letters: int, shown: str) -> None:
    (note,) = read(generation={"chat_format": "x" * letters}).notes
    assert note.endswith(f'not applied: chat_format "{shown} (unknown)')
