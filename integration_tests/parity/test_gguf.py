"""GGUF files give the weights, settings and tokenizers of the same models as Hugging Face folders.

The test writes the files from random models of transformers as llama.cpp's converter does, with its
names, row order of queries and keys, and rotary factors. The results equal those of the folder bit
for bit.
"""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_ckpt import Checkpoint, import_hf
from megatron_ckpt.formats.gguf_file import GGUFFile
from megatron_ckpt.formats.gguf_tokenizer import tokenizer_files
from megatron_data import load_tokenizer

gguf = pytest.importorskip("gguf")
sentencepiece = pytest.importorskip("sentencepiece")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="transformers needs accelerate to read GGUF files")

SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
}
SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CASES = {
    "tied": {"tie_word_embeddings": True},
    "untied": {},
    "wide-heads": {"head_dim": 12},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "llama3-rope": {"rope_parameters": SCALING},
}
SPLITS = {
    "gpt-2": tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    ),
}
LINEAR = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "The year 1851 was 12,345 days.",
    "  two spaces, 5  6\n\n\tand tabs   ",
    "café 東京 😀 don't it's WE'LL",
    "<|im_start|>user\nHi<|im_end|>\n",
    "a  5 b   77\r\n",
]
USER_DEFINED = ["\n", "\u2581\u2581", "<b>"]
LINES = Path(__file__).read_text().splitlines()


def trained_tokenizer(pre: str) -> Any:
    """Returns a byte-level BPE of 400 tokens trained on this file."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = SPLITS[pre]
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text(), *TEXTS], trainer)
    return tokenizer


def random_llama(settings: dict[str, Any], vocab_size: int) -> Any:
    torch.manual_seed(5)
    config = transformers.LlamaConfig(**SMALL | settings, vocab_size=vocab_size)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def add_shape(writer: Any, config: Any) -> None:
    """Writes the settings of both architectures."""
    writer.add_name("random")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(path: Path, model: Any, tokenizer: Any, pre: str) -> None:
    """Writes a Llama model as llama.cpp's converter does."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    add_shape(writer, config)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    content = json.loads(tokenizer.to_str())
    vocab = sorted(content["model"]["vocab"].items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_types([3 if token in SPECIAL else 1 for token, _ in vocab])
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.named_parameters():
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        for letter, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
            if f".{letter}_proj." in name:
                halves = tensor.unflatten(0, (heads, 2, config.head_dim // 2))
                tensor = halves.transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(theirs, tensor.detach().contiguous().numpy())
    if config.rope_parameters["rope_type"] == "llama3":
        rotary = model.model.rotary_emb
        plain = config.rope_parameters["rope_theta"] ** -(
            torch.arange(0, config.head_dim, 2) / config.head_dim
        )
        writer.add_tensor("rope_freqs.weight", (plain / rotary.inv_freq).float().numpy())
    finish(writer)


def sentence_piece(prefix: bool) -> Any:
    """Returns a BPE of SentencePiece with 400 pieces, trained on this file."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*Path(__file__).read_text().splitlines(), *TEXTS]),
        model_writer=model,
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        # After each of these, llama.cpp and transformers add the space of the prefix again.
        user_defined_symbols=[] if prefix else USER_DEFINED,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def add_sentence_piece(writer: Any, pieces: Any, prefix: bool) -> None:
    """Writes a tokenizer as llama.cpp's converter does."""
    numbers = range(pieces.get_piece_size())

    def kind(number: int) -> int:
        if pieces.is_unknown(number):
            return 2
        if pieces.is_control(number):
            return 3
        if pieces.is_byte(number):
            return 6
        return 4 if not prefix and pieces.id_to_piece(number) in USER_DEFINED else 1

    kinds = [kind(number) for number in numbers]
    names = [pieces.id_to_piece(number) for number in numbers]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    # Spaces of user-defined pieces are written without SentencePiece's symbol.
    writer.add_token_list(
        [
            name.replace("\u2581", " ") if each == 4 else name
            for name, each in zip(names, kinds, strict=True)
        ]
    )
    writer.add_token_scores([pieces.get_score(number) for number in numbers])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(prefix)


def random_gemma3(settings: dict[str, Any]) -> Any:
    """Returns a model whose gains survive the addition and subtraction of 1."""
    torch.manual_seed(5)
    sizes = {"head_dim": 8, "vocab_size": 400, "query_pre_attn_scalar": 8, "sliding_window": 9}
    config = transformers.Gemma3TextConfig(**SMALL | sizes | settings)
    model = transformers.Gemma3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter.normal_() * 1024).round() / 1024)
    return model


def write_gemma3(path: Path, model: Any, tokenizer: Any) -> None:
    """Writes a Gemma 3 model as llama.cpp's converter does."""
    config = model.config
    writer = gguf.GGUFWriter(path, "gemma3")
    add_shape(writer, config)
    rotary = config.rope_parameters["full_attention"]
    writer.add_rope_freq_base(rotary["rope_theta"])
    if rotary["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rotary["factor"])
    writer.add_sliding_window(config.sliding_window)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    add_sentence_piece(writer, tokenizer, prefix=False)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, config.num_hidden_layers)
    for name, tensor in model.named_parameters():
        theirs = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(theirs, (tensor + name.endswith("norm.weight")).detach().numpy())
    finish(writer)


@pytest.mark.parametrize("case", CASES)
def test_a_file_gives_the_checkpoint_of_the_folder(tmp_path: Path, case: str) -> None:
    tokenizer = trained_tokenizer("gpt-2")
    model = random_llama(CASES[case], tokenizer.get_vocab_size())
    model.save_pretrained(tmp_path / "folder")
    write_gguf(tmp_path / "model.gguf", model, tokenizer, "gpt-2")
    file = Checkpoint(import_hf(tmp_path / "model.gguf", tmp_path / "file-run"))
    folder = Checkpoint(import_hf(tmp_path / "folder", tmp_path / "folder-run"))
    assert file.model == folder.model
    assert sorted(file.tensors) == sorted(folder.tensors)
    for name in folder.tensors:
        assert torch.equal(file.read_tensor(name), folder.read_tensor(name)), name


@pytest.mark.parametrize(
    "settings",
    [
        {"num_hidden_layers": 7},
        {"rope_parameters": LINEAR, "final_logit_softcapping": 5.0, "sliding_window": 4},
    ],
    ids=["pattern of layers", "linear"],
)
def test_a_file_of_gemma3_gives_the_checkpoint_of_the_folder(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    model = random_gemma3(settings)
    model.save_pretrained(tmp_path / "folder")
    write_gemma3(tmp_path / "model.gguf", model, sentence_piece(prefix=False))
    file = Checkpoint(import_hf(tmp_path / "model.gguf", tmp_path / "file-run"))
    folder = Checkpoint(import_hf(tmp_path / "folder", tmp_path / "folder-run"))
    assert file.model == folder.model
    assert sorted(file.tensors) == sorted(folder.tensors)
    for name in folder.tensors:
        assert torch.equal(file.read_tensor(name), folder.read_tensor(name)), name


@pytest.mark.parametrize("prefix", [False, True], ids=["no prefix", "prefix"])
def test_a_sentence_piece_model_is_restored(tmp_path: Path, prefix: bool) -> None:
    original = sentence_piece(prefix)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    add_sentence_piece(writer, original, prefix)
    finish(writer)
    files = tokenizer_files(GGUFFile(tmp_path / "model.gguf"))
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    ours = load_tokenizer(tmp_path)
    for text in [*(text for text in TEXTS if "<|" not in text), *LINES, "a b", "<b>x</b>"]:
        assert ours.encode(text) == original.encode(text), text
        assert ours.decode(ours.encode(text)) == text
    assert (ours.bos_id, ours.eos_id) == (1, 2)


@pytest.mark.parametrize("pre", SPLITS)
def test_a_tokenizer_is_restored(tmp_path: Path, pre: str) -> None:
    original = trained_tokenizer(pre)
    model = random_llama({}, original.get_vocab_size())
    write_gguf(tmp_path / "model.gguf", model, original, pre)
    checkpoint = import_hf(tmp_path / "model.gguf", tmp_path / "run")
    ours = load_tokenizer(checkpoint / "tokenizer")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(checkpoint / "tokenizer")
    for text in TEXTS:
        tokens = original.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == tokens
        assert ours.decode(tokens) == text
        assert theirs(text, add_special_tokens=False)["input_ids"] == tokens
    assert (ours.bos_id, ours.eos_id) == (1, 2)
    assert ours.vocab_size == original.get_vocab_size()


@pytest.mark.parametrize("case", ["tied", "untied", "wide-heads"])
def test_transformers_reads_the_same_weights_from_these_files(tmp_path: Path, case: str) -> None:
    tokenizer = trained_tokenizer("gpt-2")
    model = random_llama(CASES[case], tokenizer.get_vocab_size())
    write_gguf(tmp_path / "model.gguf", model, tokenizer, "gpt-2")
    read = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    )
    theirs = dict(read.named_parameters())
    for name, tensor in model.named_parameters():
        assert torch.equal(theirs[name], tensor), name
    assert read.config.head_dim == model.config.head_dim
