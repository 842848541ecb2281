"""Conversations have the tokens and targets of Megatron's tokenizers in every prompt format.

Releases of megatron-core up to 0.16 lack these classes and skip this module.
`test_conversation_tokenizers.py` of megatron-data compares with recorded results of the classes.
"""

import copy
import json
import re
from importlib.metadata import version

import pytest
import tokenizers
from megatron_data.tokenizers import (
    MULTIMODAL_PROMPT_FORMATS,
    PROMPT_FORMATS,
    MultimodalTokenizer,
    NullMultimodalTokenizer,
    SFTTokenizer,
)
from tokenizers import models, pre_tokenizers

pytest.importorskip("transformers")
of_sft = pytest.importorskip("megatron.core.tokenizers.text.libraries.sft_tokenizer")
vision = "megatron.core.tokenizers.vision.libraries"
of_images = pytest.importorskip(f"{vision}.multimodal_tokenizer")
of_null = pytest.importorskip(f"{vision}.null_multimodal_tokenizer")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
SYSTEM = {"role": "system", "content": " Be kind. "}
TURNS = [
    {"role": "user", "content": "Hi /think\n\nyou <image> there"},
    {"role": "assistant", "content": " Hello! "},
    {"role": "user", "content": "Näxt 日本<image><image>"},
    {"role": "assistant", "content": "See you, 12."},
]
CONVERSATIONS = [[SYSTEM, *TURNS], TURNS, TURNS[:3], [SYSTEM, TURNS[0]]]
SPECIAL = [
    *("<s>", "</s>", "<unk>", "<pad>", "<|end_of_text|>", "<|finetune_right_pad_id|>"),
    *(f"<SPECIAL_{number}>" for number in (10, 11, 12, 14, 15, 233)),
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("[INST]", "[/INST]", "[PREFIX]"),
]
# Megatron assumes that an answer starts after a fixed number of tokens, so the vocabulary must fit:
# "assistant" is two tokens with Yi's tokenizer, and one with all others.
WORDS = r"\n\n|\w+|\s|[^\w\s]"


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    def make(prompt_format):
        pattern = f"ass|istant|{WORDS}" if prompt_format == "nvlm-yi-34b" else WORDS
        said = json.dumps([SYSTEM, *TURNS], ensure_ascii=False) + "<img></Image>Qwen, created by "
        said += "Alibaba Cloud. You are a helpful assistant.\n\n \nUser Assistant System"
        words = dict.fromkeys([*SPECIAL, *re.findall(pattern, said)])
        vocabulary = {word: number for number, word in enumerate(words)}
        tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        tokenizer.add_special_tokens(SPECIAL)
        folder = tmp_path_factory.mktemp("tokenizer")
        tokenizer.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
        config |= {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        template = LLAMA if prompt_format == "llama3" else CHATML
        (folder / "chat_template.jinja").write_text(template)
        return folder

    return make


def compare(ours, theirs, conversation, loss="assistant"):
    """Compares tokens and targets; Megatron modifies the conversation, so it is copied."""
    tokens, targets = theirs.tokenize_conversation(copy.deepcopy(conversation), True, False)
    counted = ours.tokenize_conversation(conversation, loss=loss)
    assert counted.ids.tolist() == tokens.tolist()
    assert counted.targets.tolist() == targets.tolist()
    prompt = theirs.tokenize_conversation(copy.deepcopy(conversation), False, True)
    asked = ours.tokenize_conversation(conversation, add_generation_prompt=True)
    assert asked.ids.tolist() == prompt.tolist()


@pytest.mark.parametrize("prompt_format", PROMPT_FORMATS)
def test_prompt_formats(folder_of, prompt_format):
    folder = folder_of(prompt_format)
    ours = SFTTokenizer.load(folder, prompt_format)
    theirs = of_sft.SFTTokenizer(str(folder), prompt_format)
    core = tuple(map(int, version("megatron-core").split(".")[:2]))
    counts_all = ("default", "identity") if core >= (0, 19) else ("default",)
    for conversation in CONVERSATIONS:
        compare(ours, theirs, conversation, "all" if prompt_format in counts_all else "assistant")
    assert (ours.pad_id, ours.bos_id, ours.eod_id) == (theirs.pad_id, theirs.bos_id, theirs.eod)
    assert ours.encode("Hello! <s>") == theirs.text_to_ids("Hello! <s>")
    assert ours.vocab_size == theirs.vocab_size


@pytest.mark.parametrize("image_tag", of_images.IMAGE_TAGS)
@pytest.mark.parametrize("prompt_format", MULTIMODAL_PROMPT_FORMATS)
def test_prompt_formats_with_images(folder_of, prompt_format, image_tag):
    folder = folder_of(prompt_format)
    names = ["<image>", "<Image>", "</Image>"]
    try:
        theirs = of_images.MegatronMultimodalTokenizer(str(folder), prompt_format, names, image_tag)
    except NotImplementedError as error:
        pytest.skip(f"this megatron-core has no such format: {error}")
    if prompt_format == "nemotron6-moe":  # its targets are not available
        theirs._prompt_config.assistant_prefix_len = 3
    ours = MultimodalTokenizer.load(
        folder, prompt_format, special_tokens=names, image_tag=image_tag
    )
    for conversation in CONVERSATIONS:
        compare(ours, theirs, conversation)
    text = "Hi <image> there"
    before = [ours.bos_id] if prompt_format == "nvlm-yi-34b" else []  # texts get none of ours
    assert before + ours.encode(text) == theirs.tokenize(text)
    assert ours.encode_batch([text]) == [ours.encode(text)]
    assert (ours.pad_id, ours.eod_id) == (theirs.pad, theirs.eod)
    bos = theirs.bos if hasattr(theirs, "bos") else theirs.tokenizer.bos_token_id  # not in 0.19
    assert ours.bos_id == bos
    assert ours.image_id == theirs.convert_tokens_to_ids("<image>")
    assert ours.vocab_size == theirs.vocab_size + 3  # Megatron's tokenizer omits added tokens


@pytest.mark.parametrize("prompt_format", ["qwen2p0", "qwen2p5"])
def test_a_system_message_may_be_forced(folder_of, prompt_format):
    folder = folder_of(prompt_format)
    theirs = of_images.MegatronMultimodalTokenizer(
        str(folder), prompt_format, ["<image>"], "", force_system_message=True
    )
    ours = MultimodalTokenizer.load(folder, prompt_format, force_system_message=True)
    for conversation in CONVERSATIONS:
        compare(ours, theirs, conversation)


def test_the_comparison_detects_another_format_and_another_mask(folder_of):
    folder = folder_of("qwen2p5")
    theirs = of_images.MegatronMultimodalTokenizer(str(folder), "qwen2p5", ["<image>"], "")
    compare(MultimodalTokenizer.load(folder, "qwen2p5"), theirs, TURNS)
    for other, loss in (("nvlm-yi-34b", "assistant"), ("qwen2p5", "all")):
        with pytest.raises(AssertionError):
            compare(MultimodalTokenizer.load(folder, other), theirs, TURNS, loss)


def test_numbers_for_text():
    theirs, ours = of_null.MegatronNullMultimodalTokenizer(100), NullMultimodalTokenizer(100)
    assert ours.encode("3 1 4") == theirs.tokenize("3 1 4")
    assert ours.decode([3, 1, 4]) == theirs.detokenize([3, 1, 4])
    for token in ("<image>", "7"):
        assert ours.token_id(token) == theirs.convert_tokens_to_ids(token)
    assert (ours.vocab_size, ours.eod_id) == (theirs.vocab_size, theirs.eod)
