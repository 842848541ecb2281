"""SFTTokenizer, MultimodalTokenizer and NullMultimodalTokenizer.

The expected texts and masks are results of Megatron-LM's classes (main, August 2026; see
`integration_tests/parity/test_conversations_against_megatron.py`, which runs them).
"""

import copy
import json
import pickle
from pathlib import Path
from typing import Any, get_args

import pytest
from megatron_data import (
    DataError,
    HuggingFaceTokenizer,
    IndexedDataset,
    build_tokenizer,
    load_tokenizer,
)
from megatron_data.cli import main
from megatron_data.tokenizers import (
    MULTIMODAL_PROMPT_FORMATS,
    PROMPT_FORMATS,
    ChatTemplate,
    ImageTemplate,
    MultimodalPromptFormat,
    MultimodalTokenizer,
    NullMultimodalTokenizer,
    SFTPromptFormat,
    SFTTokenizer,
    conversation_tokenizer,
    huggingface,
)

pytest.importorskip("jinja2")

TALK = [
    {"role": "system", "content": " Be kind. "},
    {"role": "user", "content": "you <image> there"},
    {"role": "assistant", "content": " Hello! "},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "See you"},
]
IM = "<|im_start|>system\n Be kind. <|im_end|>\n<|im_start|>user\nyou <img><image></img> there"
IM += "<|im_end|>\n<|im_start|>assistant\n Hello! <|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
IM += "<|im_start|>assistant\nSee you<|im_end|>\n"
QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
LLAMA = "<|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|><|start_header_id|>user"
LLAMA += "<|end_header_id|>\n\nyou <img><image></img> there<|eot_id|><|start_header_id|>assistant"
LLAMA += "<|end_header_id|>\n\nHello!<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi"
LLAMA += "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nSee you<|eot_id|>"


@pytest.fixture(scope="module")
def folder(tokenizer: HuggingFaceTokenizer, tmp_path_factory) -> Path:
    """A tokenizer with special tokens and a chat template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.with_special_tokens(["<s>", "</s>", "<pad>"]).save(folder)
    config = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    template = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


def test_the_names_are_those_of_the_formats() -> None:
    assert (*PROMPT_FORMATS,) == get_args(SFTPromptFormat)
    assert (*MULTIMODAL_PROMPT_FORMATS,) == get_args(MultimodalPromptFormat)


def test_only_mistrals_format_has_no_system_message_as_in_megatron() -> None:
    formats = {**PROMPT_FORMATS, **MULTIMODAL_PROMPT_FORMATS}
    assert [name for name, each in formats.items() if not each.system] == ["mistral"]


@pytest.mark.parametrize(
    ("prompt_format", "text", "said"),
    [
        ("mistral", "<s>[INST] you <img><image></img> there[/INST]  Hello! </s>[INST] Hi[/INST] "
         "See you</s>", ["  Hello! </s>", " See you</s>"]),
        ("llama3p1", f"<s>{LLAMA}", ["Hello!<|eot_id|>", "See you<|eot_id|>"]),
        ("llama3p2", f"<s>{LLAMA}", ["Hello!<|eot_id|>", "See you<|eot_id|>"]),
        ("nvlm-yi-34b", f"<s>{IM}", [" Hello! <|im_end|>\n", "See you<|im_end|>\n"]),
        ("qwen2p5", IM.replace(" Be kind. ", QWEN),
         [" Hello! <|im_end|>\n", "See you<|im_end|>\n"]),
        ("nemotron5", f"<s>{IM}".replace("|im_start|", "SPECIAL_14").replace("|im_end|",
         "SPECIAL_15"), [" Hello! <SPECIAL_15>\n", "See you<SPECIAL_15>\n"]),
        ("nemotron5-aligned", "<s>System\n Be kind. \n[PREFIX]User\nyou <img><image></img> there\n"
         "[PREFIX]Assistant\n Hello! \n[PREFIX]User\nHi\n[PREFIX]Assistant\nSee you\n[PREFIX]",
         [" Hello! \n[PREFIX]", "See you\n[PREFIX]"]),
        ("chatml", "<s><system> Be kind. <user>you <img><image></img> there<assistant> Hello! "
         "<user>Hi<assistant>See you", [" Hello! ", "See you"]),
    ],
)  # fmt: skip
def test_conversations_with_images(
    folder: Path, prompt_format: str, text: str, said: list[str]
) -> None:
    tokenizer = MultimodalTokenizer.load(
        folder,
        prompt_format,
        image_tag="internvl",
        force_system_message=prompt_format == "qwen2p5",
    )
    talk = copy.deepcopy(TALK)
    for _ in range(2):  # the messages are not changed, so a second call gives the same
        ids, counted = tokenizer.tokenize_conversation(talk)
        assert tokenizer.decode(ids.tolist()) == text
    assert talk == TALK
    rendered = tokenizer.template.render(talk)
    assert rendered.text == text
    assert [rendered.text[first:last] for first, last in rendered.assistant_spans] == said
    assert tokenizer.reference.encode(text) == ids.tolist()
    assert 0 < counted.sum() < len(counted)
    targets = tokenizer.tokenize_conversation(talk).targets
    assert targets[counted == 1].tolist() == ids[counted == 1].tolist()
    assert set(targets[counted == 0].tolist()) == {-100}
    assert tokenizer.image_id in ids and tokenizer.vocab_size > tokenizer.image_id


def test_tags_are_put_around_images_in_texts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, tagged = (
        MultimodalTokenizer.load(folder, "chatml", image_tag=tag) for tag in ("", "nvlm")
    )
    text = "the <image> whale"
    assert plain.decode(plain.encode(text)) == text
    assert tagged.decode(tagged.encode(text)) == "the <Image><image></Image> whale"
    monkeypatch.setattr(huggingface, "SEGMENT_CHARACTERS", 3)
    assert [*tagged.split_text(text)] == [text]
    assert [*plain.split_text(text)] == ["the", " <image> whale"]
    assert plain.fingerprint == plain.reference.fingerprint != tagged.fingerprint
    without = MultimodalTokenizer.load(folder, "chatml", special_tokens=["<a>"])
    assert without.image_id is None and without.token_id("<a>") is not None


def test_texts_with_images_are_preprocessed(folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    texts = ["the <image> whale", "<image><image>", "sea " * 9]
    Path("t.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    words = f"--input t.jsonl --output-prefix t --tokenizer-model {folder} --image-tag-type nvlm"
    words += " --tokenizer-prompt-format chatml"  # the file that names the kind of tokenizer
    assert main(["preprocess", *words.split(), "--workers", "2"]) == 0
    tokenizer = MultimodalTokenizer.load(folder, "chatml", image_tag="nvlm")
    with IndexedDataset("t_text_document") as dataset:
        assert [dataset.get(n).tolist() for n in range(3)] == [*map(tokenizer.encode, texts)]


def test_the_loss_does_not_count_messages_of_tools(folder: Path) -> None:
    """Megatron counts them."""
    talk = [TALK[1], {"role": "tool", "content": "42"}, TALK[-1]]
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    talk.insert(1, {"role": "assistant", "content": None, "tool_calls": [call]})
    rendered = MultimodalTokenizer.load(folder, "llama3p1").template.render(talk)
    said = [rendered.text[first:last] for first, last in rendered.assistant_spans]
    assert said == ['{"name": "add", "parameters": {"a": 1}}<|eot_id|>', "See you<|eot_id|>"]
    assert '<|start_header_id|>ipython<|end_header_id|>\n\n"42"<|eot_id|>' in rendered.text


@pytest.mark.parametrize(
    ("options", "pad"),
    [
        ({"sft_tokenizer_prompt_format": "default"}, "<pad>"),
        ({"sft_tokenizer_prompt_format": "identity", "tokenizer_special_tokens": ["<unk>"]},
         "<unk>"),
        ({}, None),
        ({"tokenizer_prompt_format": "qwen2p0", "image_tag_type": "nvlm",
          "force_system_message": True}, "<pad>"),
        ({"tokenizer_prompt_format": "mistral"}, None),
    ],
)  # fmt: skip
def test_a_saved_tokenizer_equals_the_original(
    folder: Path, tmp_path: Path, options: dict[str, Any], pad: str | None
) -> None:
    kind = "MultimodalTokenizer" if "tokenizer_prompt_format" in options else "SFTTokenizer"
    made = build_tokenizer(kind, tokenizer_model=str(folder), **options)
    assert isinstance(made, SFTTokenizer)
    assert (made.bos_id, made.eos_id) == (made.token_id("<s>"), made.token_id("</s>"))
    assert made.pad_id == (None if pad is None else made.token_id(pad))
    assert (made.pad_id is None) == (pad is None)
    assert (made.token_id("<image>") is None) == (kind == "SFTTokenizer")
    made.save(tmp_path)
    for again in (load_tokenizer(tmp_path), pickle.loads(pickle.dumps(made))):
        assert type(again) is type(made) and isinstance(again, SFTTokenizer)
        assert (again.fingerprint, again.pad_id) == (made.fingerprint, made.pad_id)
        mine, others = made.tokenize_conversation(TALK), again.tokenize_conversation(TALK)
        assert mine.targets.tolist() == others.targets.tolist()
        assert mine.ids.tolist() == others.ids.tolist()
        assert again.encode("a <image>") == made.encode("a <image>")


def test_a_saved_tokenizer_keeps_the_variables_of_its_template(
    folder: Path, tmp_path: Path
) -> None:
    template = ChatTemplate("{{ day }}{{ messages[0].content }}", {"day": "Hi "})
    SFTTokenizer(HuggingFaceTokenizer.load(folder), template).save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert isinstance(again, SFTTokenizer)
    assert again.template.render(TALK[1:]).text == "Hi " + TALK[1]["content"]


def test_megatrons_format_is_the_default(folder: Path) -> None:
    for tokenizer in (
        build_tokenizer("SFTTokenizer", tokenizer_model=str(folder)),
        build_tokenizer(tokenizer_model=str(folder), sft_tokenizer_prompt_format="identity"),
    ):
        assert isinstance(tokenizer, SFTTokenizer)
    asked = SFTTokenizer.load(folder).tokenize_conversation(TALK, add_generation_prompt=True)
    assert SFTTokenizer.load(folder).decode(asked.ids.tolist()).startswith("<SPECIAL_10>System\n")
    everything = SFTTokenizer.load(folder).tokenize_conversation(TALK, loss="all")
    assert everything.loss_mask.all()


def test_a_plain_tokenizer_uses_the_template_in_its_folder(folder: Path) -> None:
    tokenizer = conversation_tokenizer(load_tokenizer(folder), folder / "tokenizer.json")
    asked = tokenizer.tokenize_conversation(TALK[3:4], add_generation_prompt=True)
    assert tokenizer.decode(asked.ids.tolist()) == "<s><user>Hi<assistant>"
    with pytest.raises(DataError, match="a NullMultimodalTokenizer has no chat template"):
        conversation_tokenizer(NullMultimodalTokenizer(9), "x")


def test_token_ids_as_text(tmp_path: Path) -> None:
    tokenizer = build_tokenizer("NullMultimodalTokenizer", vocab_size=100)
    tokenizer.save(tmp_path)
    for each in (tokenizer, load_tokenizer(tmp_path)):
        assert isinstance(each, NullMultimodalTokenizer)
        assert each.encode("3 1 4") == [3, 1, 4] and each.vocab_size == 101
        assert (each.token_id("<image>"), each.token_id("7")) == (-200, 7)
    with pytest.raises(DataError, match="'7 8' is 2 tokens; give exactly one"):
        NullMultimodalTokenizer(9).token_id("7 8")


def test_a_chat_template_file_works_with_images(folder: Path, tmp_path: Path) -> None:
    """`load` of the two classes has the same parameters."""
    file = tmp_path / "own.jinja"
    file.write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ bos_token }}"
    )
    kinds: tuple[type[SFTTokenizer], ...] = (SFTTokenizer, MultimodalTokenizer)
    texts = [
        kind.load(folder, None, file, ["<image>"]).template.render(TALK[:1]).text for kind in kinds
    ]
    assert texts[0] == texts[1] == f"<{TALK[0]['role']}>{TALK[0]['content']}<s>"
    tagged = MultimodalTokenizer.load(folder, chat_template=file, image_tag="nvlm")
    said = [{"role": "user", "content": "<image>"}]
    assert tagged.template.render(said).text == "<user><Image><image></Image><s>"
    with pytest.raises(DataError, match=f"--force-system-message: {file} has no system message"):
        MultimodalTokenizer.load(folder, chat_template=file, force_system_message=True)
    for given in ({}, {"prompt_format": "chatml", "chat_template": file}):
        with pytest.raises(DataError, match="either --tokenizer-prompt-format or --chat-template"):
            MultimodalTokenizer.load(folder, **given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "SFTTokenizer", "tokenizer_prompt_format": "chatml"},
         "--tokenizer-prompt-format does not go with --tokenizer-type SFTTokenizer"),
        ({"kind": "MultimodalTokenizer"}, "needs --tokenizer-prompt-format"),
        ({"kind": "HuggingFaceTokenizer", "image_tag_type": "nvlm"},
         "--image-tag-type does not go with --tokenizer-type HuggingFaceTokenizer"),
        ({"tokenizer_prompt_format": "llama4"}, "no prompt format 'llama4'; give one of mistral, "),
        ({"sft_tokenizer_prompt_format": "x"}, "no prompt format 'x'; give one of default, nemo"),
        ({"tokenizer_prompt_format": "chatml", "image_tag_type": "x"}, "unknown image tag 'x'"),
        ({"tokenizer_prompt_format": "chatml", "force_system_message": True},
         "the prompt format chatml has no system message; use the prompt format qwen2p0"),
        ({"chat_template": "nowhere"}, "no chat template at nowhere"),
        ({"chat_template": "a", "sft_tokenizer_prompt_format": "default"}, "give only one of"),
    ],
)  # fmt: skip
def test_invalid_options_are_refused(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        build_tokenizer(**{"tokenizer_model": str(folder), **options})


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            {"role": "assistant", "content": "<image>"},
            "message 2: <image> in a message of the assistant",
        ),
        ({"role": "user", "content": ""}, "message 2 has no text"),
        ({"role": "assistant", "content": None}, "message 2 has no text"),
        (
            {"role": "user", "content": [{"type": "image"}]},
            "write an image in a message as <image>",
        ),
    ],
)
def test_invalid_messages_are_refused(folder: Path, message: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        MultimodalTokenizer.load(folder, "chatml").tokenize_conversation([TALK[1], message])


def test_the_command(folder: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
    command = f"tokenize-conversations --input t.jsonl --tokenizer-model {folder}"
    images = "--tokenizer-type MultimodalTokenizer --tokenizer-prompt-format mistral"
    for name, options in (
        ("own", ""),
        ("images", f"{images} --image-tag-type nvlm --special-tokens <image> <Image>"),
    ):
        assert main([*command.split(), "--output-prefix", name, *options.split()]) == 0
    tokenizer = MultimodalTokenizer.load(
        folder, "mistral", image_tag="nvlm", special_tokens=["<image>", "<Image>"]
    )
    with IndexedDataset("images_conversation") as dataset:
        expected = tokenizer.tokenize_conversation(TALK)
        assert dataset.get(0).tolist() == expected.ids.tolist()  # it ends with </s>
    with IndexedDataset("images_conversation_loss") as mask:
        assert mask.get(0).tolist() == expected.loss_mask.tolist()
    capsys.readouterr()
    words = [*command.split(), "--output-prefix", "x", "--image-tag-type", "nvlm"]
    assert main(words) == 2
    assert "--image-tag-type does not go with --tokenizer-type Hugging" in capsys.readouterr().err


def test_a_forced_system_message_and_tags_by_hand() -> None:
    """A system message is put first; calls of tools may have a text with an image."""
    source = "{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}"
    plain = ChatTemplate(source)
    asked = [{"role": "user", "content": "a <image>", "tool_calls": [1]}]
    system = [{"role": "system", "content": "s"}]
    forced = ImageTemplate(plain, "internvl", system_message="f")
    for talk in (asked, [*system, *asked]):
        assert forced.render(talk).text == "[system|f][user|a <img><image></img>]"
    dropped = ImageTemplate(plain, system=False)
    for talk in (asked, [*system, *asked]):
        assert dropped.render(talk).text == "[user|a <image>]"
    assert ImageTemplate(plain).render([*system, *asked]).text == "[system|s][user|a <image>]"
    assert (forced.render([]).text, dropped.render([]).text) == ("[system|f]", "")
    kinds = (plain, ImageTemplate(plain), forced, dropped, ImageTemplate(plain, "nvlm"))
    assert len({each.fingerprint for each in kinds}) == len(kinds)
    assert pickle.loads(pickle.dumps(forced)).fingerprint == forced.fingerprint
    with pytest.raises(DataError, match="a variable of the chat template is not a JSON value"):
        _ = plain.with_variables({"x": object()}).fingerprint


def test_padding_is_the_end_of_text_unless_it_is_named(folder: Path) -> None:
    named = HuggingFaceTokenizer.load(folder)
    unnamed = HuggingFaceTokenizer(named.definition, {"eos": "</s>"})
    template = ChatTemplate("x")
    assert SFTTokenizer(named, template).pad_id == named.token_id("<pad>")
    assert SFTTokenizer(unnamed, template).pad_id == named.token_id("</s>")
    assert SFTTokenizer(named, template, "<s>").pad_id == named.token_id("<s>")
    other = conversation_tokenizer(SFTTokenizer(named, template, "<s>"), template=ChatTemplate("y"))
    assert other.template.render(TALK[:1]).text == "y"
