"""What a GGUF file becomes, field by field: tokenizers, settings, generation, weights."""

import json

import numpy as np
import pytest
import torch
from megatron_ckpt import CheckpointError, ForeignModel, View
from megatron_ckpt.formats.gguf import is_gguf, open_gguf

from . import test_gguf
from .test_gguf import FFN, GROUPS, HEAD_DIM, HEADS, HIDDEN, SENTENCE_PIECE, VOCAB, tensors, write

family = test_gguf.family  # the fixture
WORDS = [f"x{i}" for i in range(VOCAB)]
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def source(tmp_path, **settings):
    return open_gguf(write(tmp_path / "m.gguf", **settings))


def content(tmp_path, name="tokenizer/tokenizer.json", **settings):
    return json.loads(source(tmp_path, **settings).files[name])


def test_files_are_laid_out_as_transformers_writes_them(tmp_path):
    words = ["\u65e5", *WORDS[1:]]
    more = {"tokenizer.ggml.tokens": words, "tokenizer.ggml.merges": ["x1 x2"]}
    files = source(tmp_path, more=more).files
    for name, indent in (
        ("huggingface/config.json", 2),
        ("huggingface/generation_config.json", 2),
        ("tokenizer/tokenizer_config.json", 2),
        ("tokenizer/tokenizer.json", None),
    ):
        text = json.dumps(json.loads(files[name]), indent=indent, ensure_ascii=False)
        assert files[name].decode() == text + "\n", name
    assert "\u65e5" in files["tokenizer/tokenizer.json"].decode()


def token(number, text, special):
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, **flags, "special": special}


def test_a_byte_level_tokenizer_is_that_of_hugging_face_in_every_field(tmp_path):
    found = content(tmp_path, more={"tokenizer.ggml.add_bos_token": None})
    words = [*"abcdefghij", "ab", "abc"]
    vocab = {word: number for number, word in enumerate(words)}
    assert found == {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [token(VOCAB - 2, "<s>", True), token(VOCAB - 1, "<t>", False)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{**BYTE_LEVEL, "use_regex": True}]},
        "post_processor": {**BYTE_LEVEL, "use_regex": True},
        "decoder": {**BYTE_LEVEL, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab | {"<s>": VOCAB - 2, "<t>": VOCAB - 1},
            "merges": [["a", "b"], ["ab", "c"]],
        },
    }


def test_pre_tokenizers_split_digits_and_words_as_their_models_do(tmp_path):
    digits = content(tmp_path, more={"tokenizer.ggml.pre": "smollm"})
    assert digits["pre_tokenizer"]["pretokenizers"] == [
        {"type": "Digits", "individual_digits": True},
        {**BYTE_LEVEL, "use_regex": True},
    ]
    llama = content(tmp_path, more={"tokenizer.ggml.pre": "llama3"})
    split, level = llama["pre_tokenizer"]["pretokenizers"]
    assert split.pop("pattern")["Regex"].count(r"\p{N}{1,3}") == 1
    assert split == {"type": "Split", "behavior": "Isolated", "invert": False}
    assert level == {**BYTE_LEVEL, "use_regex": False}
    assert llama["model"]["ignore_merges"]


def test_a_sentence_piece_tokenizer_is_that_of_hugging_face_in_every_field(tmp_path):
    # Without types all tokens are normal; without an unknown token there is none.
    more = SENTENCE_PIECE | {
        "tokenizer.ggml.tokens": ["a" * 256, *WORDS[1:]],
        "tokenizer.ggml.token_type": None,
        "tokenizer.ggml.bos_token_id": None,
        "tokenizer.ggml.add_bos_token": None,
    }
    found = content(tmp_path, more=more)
    space = "\u2581"
    assert found == {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": space},
                {"type": "Replace", "pattern": {"String": " "}, "content": space},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": space}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {"a" * 256: 0} | {word: at for at, word in enumerate(WORDS) if at},
            "merges": [],
        },
    }
    settings = content(tmp_path, "tokenizer/tokenizer_config.json", more=more)
    assert settings["add_bos_token"] is True  # as llama.cpp does for these


def test_equal_scores_are_joined_with_the_longer_left_piece_first(tmp_path):
    words = ["a", "aa", "aaa", *WORDS[3:]]
    for types in (None, [1] * VOCAB):  # without types all tokens are normal
        more = {"tokenizer.ggml.tokens": words, "tokenizer.ggml.token_type": types}
        found = content(tmp_path, more=SENTENCE_PIECE | more)
        assert found["model"]["merges"] == [["aa", "a"], ["a", "a"], ["a", "aa"]]


@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("ends", [False, True])
def test_tokens_are_added_around_texts_and_pairs(tmp_path, starts, ends):
    more = {
        "tokenizer.ggml.add_bos_token": starts,
        "tokenizer.ggml.add_eos_token": ends,
        "tokenizer.ggml.eos_token_id": np.uint32(VOCAB - 1),
    }
    found = content(tmp_path, more=more)["post_processor"]
    if not (starts or ends):
        assert found["type"] == "ByteLevel"
        return
    bos = [{"SpecialToken": {"id": "<s>", "type_id": 0}}] if starts else []
    eos = [{"SpecialToken": {"id": "<t>", "type_id": 0}}] if ends else []

    def around(name):
        return [*bos, {"Sequence": {"id": name, "type_id": 0}}, *eos]

    ids = {"<s>": VOCAB - 2} if starts else {}
    ids |= {"<t>": VOCAB - 1} if ends else {}
    assert found == {
        "type": "TemplateProcessing",
        "single": around("A"),
        "pair": around("A") + around("B"),
        "special_tokens": {
            text: {"id": text, "ids": [number], "tokens": [text]} for text, number in ids.items()
        },
    }


def test_settings_of_a_tokenizer_name_its_tokens_and_templates(tmp_path):
    ids = {"eos": 1, "unknown": 2, "padding": VOCAB - 1}
    more = {f"tokenizer.ggml.{role}_token_id": np.uint32(at) for role, at in ids.items()}
    more |= {
        "tokenizer.chat_templates": ["rag"],
        "tokenizer.chat_template.rag": "three",
        "tokenizer.chat_template": "",
    }
    found = content(tmp_path, "tokenizer/tokenizer_config.json", more=more)
    assert found == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "b",
        "unk_token": "c",
        "pad_token": "<t>",
        "add_bos_token": True,
        "chat_template": [{"name": "rag", "template": "three"}],
        "clean_up_tokenization_spaces": False,
    }
    plain = content(
        tmp_path, "tokenizer/tokenizer_config.json", more={"tokenizer.chat_template": ""}
    )
    assert "chat_template" not in plain


def test_generation_has_what_the_file_has(tmp_path):
    more = {
        "tokenizer.ggml.tokens": WORDS,
        "tokenizer.ggml.merges": ["x1 x2"],
        "tokenizer.ggml.token_type": None,
        "tokenizer.ggml.eos_token_id": np.uint32(6),
        "tokenizer.ggml.padding_token_id": np.uint32(0),
        "general.sampling.top_k": np.uint32(40),
        "general.sampling.min_p": np.float32(0.05),
    }
    assert content(tmp_path, "huggingface/generation_config.json", more=more) == {
        "bos_token_id": VOCAB - 2,
        "pad_token_id": 0,
        "eos_token_id": 6,
        "do_sample": True,
        "top_k": 40,
        "min_p": 0.05,
    }


DEFAULTS = {
    "attention.head_count_kv": None,
    "rope.freq_base": None,
    "attention.key_length": np.uint32(16),
    "attention.value_length": np.uint32(16),
    "rope.dimension_count": np.uint32(16),
    "vocab_size": np.uint32(VOCAB - 1),
    "expert_count": np.uint32(0),
}


def test_settings_that_a_file_leaves_out_have_the_values_of_llama_cpp(tmp_path):
    config = source(tmp_path, llama=DEFAULTS, more={"split.count": np.uint32(1)}).config
    assert config["num_key_value_heads"] == HEADS
    assert (config["head_dim"], config["vocab_size"]) == (16, VOCAB - 1)
    assert config["rope_theta"] == 10000.0
    assert "rope_scaling" not in config
    assert "rope_scaling" not in source(tmp_path, llama={"rope.scaling.type": "none"}).config


def gemma(**settings):
    names = ("block_count", "context_length", "embedding_length", "feed_forward_length")
    numbers = {name: test_gguf.LLAMA[name] for name in names} | {
        "attention.head_count": np.uint32(HEADS),
        "attention.layer_norm_rms_epsilon": np.float32(1e-6),
        "attention.key_length": np.uint32(HEAD_DIM * 2),
        "attention.sliding_window": np.uint32(12),
        **settings,
    }
    return {f"gemma3.{key}": value for key, value in numbers.items()}


def test_settings_of_gemma_that_all_models_share_are_added(tmp_path):
    found = source(tmp_path, name="gemma3", more=gemma()).config
    assert found == {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 2,
        "max_position_embeddings": 16,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_attention_heads": HEADS,
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": HEADS,
        "head_dim": 2 * HEAD_DIM,
        "vocab_size": VOCAB,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": 2 * HEAD_DIM,
        "final_logit_softcapping": None,
        "sliding_window": 12,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "bos_token_id": VOCAB - 2,
    }
    given = gemma(
        **{
            "block_count": np.uint32(62),  # the model of 27B has another scale of its scores
            "final_logit_softcapping": np.float32(30.0),
            "attention.sliding_window_pattern": np.uint32(4),
            "rope.freq_base": np.float32(5e5),
            "rope.freq_base_swa": np.float32(2e4),
        }
    )
    other = source(tmp_path, name="gemma3", more=given).config
    assert other["query_pre_attn_scalar"] == HIDDEN // HEADS
    assert (other["final_logit_softcapping"], other["sliding_window_pattern"]) == (30.0, 4)
    assert (other["rope_theta"], other["rope_local_base_freq"]) == (5e5, 2e4)


def test_gains_of_gemma_are_stored_as_the_distance_from_one(tmp_path):
    weights = tensors()
    for i in range(2):
        weights[f"blk.{i}.post_attention_norm.weight"] = np.full(HIDDEN, 1.5, np.float32)
        weights[f"blk.{i}.post_ffw_norm.weight"] = np.full(HIDDEN, 2.0, np.float32)
        for part in "qk":
            weights[f"blk.{i}.attn_{part}_norm.weight"] = np.full(HEAD_DIM, 0.5, np.float32)
    weights["output.weight"] = weights["token_embd.weight"] * 2
    made = source(tmp_path, name="gemma3", more=gemma(), weights=weights)
    read = made.open_tensors("", {})
    layer = "model.layers.1"
    assert (read[f"{layer}.post_attention_layernorm.weight"] == 0.5).all()
    assert (read[f"{layer}.post_feedforward_layernorm.weight"] == 1.0).all()
    assert (read[f"{layer}.self_attn.k_norm.weight"] == -0.5).all()
    assert torch.equal(read["lm_head.weight"], 2 * read["model.embed_tokens.weight"])
    assert len(list(read)) == len(weights)


def test_biases_of_llama_are_found_by_their_tensors_and_reordered_like_the_weights(tmp_path):
    weights, draw = tensors(), np.random.default_rng(1)
    sizes = {"attn_q": HEADS * HEAD_DIM, "attn_k": GROUPS * HEAD_DIM, "attn_v": GROUPS * HEAD_DIM}
    sizes |= {"attn_output": HIDDEN, "ffn_gate": FFN, "ffn_up": FFN, "ffn_down": HIDDEN}
    biases = {
        f"blk.{i}.{name}.bias": draw.standard_normal(size).astype(np.float32)
        for i in range(2)
        for name, size in sizes.items()
    }
    made = source(tmp_path, weights=weights | biases)  # written in the order of llama.cpp
    assert made.config["attention_bias"] and made.config["mlp_bias"]
    read = made.open_tensors("", {})
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj"}
    names |= {"attn_output": "self_attn.o_proj", "ffn_down": "mlp.down_proj"}
    for theirs, name in names.items():
        found = read[f"model.layers.1.{name}.bias"]
        assert found.tolist() == biases[f"blk.1.{theirs}.bias"].tolist(), name
    half = {k: v for k, v in biases.items() if "attn" in k}
    config = source(tmp_path, weights=weights | half).config
    assert config["attention_bias"] and not config["mlp_bias"]


def test_a_box_of_a_file_is_that_box_of_the_converted_tensor(tmp_path):
    model = ForeignModel(write(tmp_path / "m.gguf"))
    name = "model.layers.0.self_attn.q_proj.weight"
    whole = model.read_tensor(name)
    part, filled = torch.empty(5, 7), []
    view = View(part, tuple(whole.shape), (3, 2), (5, 7))
    none = "model.norm.weight"
    model.load_tensors({none: [], name: [view]}, progress=filled.append)
    assert torch.equal(part, whole[3:8, 2:9])
    assert filled == [5 * 7 * 4]  # bytes


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"split.count": np.uint32(2)}, "is one of 2 parts"),
        ({"tokenizer.ggml.tokens": "abc"}, "tokenizer.ggml.tokens is not a list of str values"),
        ({"tokenizer.ggml.token_type": ["1"] * VOCAB}, "token_type is not a list of int values"),
        ({"tokenizer.ggml.bos_token_id": np.uint32(VOCAB)}, f"bos_token_id is {VOCAB}, but"),
        (SENTENCE_PIECE | {"tokenizer.ggml.tokens": ["a" * 257, *WORDS[1:]]}, "of 257 characters"),
    ],
)
def test_what_is_just_out_of_range_is_refused(tmp_path, more, words):
    with pytest.raises(CheckpointError, match=words):
        source(tmp_path, more=more)


def test_rotary_factors_of_another_length_are_refused(tmp_path):
    factors = np.ones(HEAD_DIM // 2 + 1, np.float32)
    with pytest.raises(CheckpointError, match="are not those of Llama 3"):
        source(tmp_path, weights=tensors() | {"rope_freqs.weight": factors})


def test_a_file_is_recognised_by_its_first_four_bytes(tmp_path):
    for data, expected in ((b"GGUF", True), (b"GGUFx", True), (b"GGU", False), (b"GGML", False)):
        (tmp_path / "f").write_bytes(data)
        assert is_gguf(tmp_path / "f") == expected
