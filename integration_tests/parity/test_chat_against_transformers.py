"""Chat templates give the text, tokens and masks of `apply_chat_template`."""

import json

import numpy as np
import pytest
from megatron_data import IndexedDataset, load_tokenizer, tokenize_conversations, train_bpe
from megatron_data.tokenizers import ChatTemplate

transformers = pytest.importorskip("transformers")

MARKED = (
    "{{ bos_token }}{%- for m in messages %}\n"
    "    {%- if m['role'] == 'assistant' %}\n"
    "        {{- '<|im_start|>assistant\\n' }}{% generation %}{{ m['content'] }}<|im_end|>\n"
    "{% endgeneration %}\n"
    "    {%- elif m.role != 'tool' %}\n"
    "        {{- '<|im_start|>' + m['role'] + '\\n' + m['content'] | trim + '<|im_end|>\\n' }}\n"
    "    {%- else %}{% continue %}\n"
    "    {%- endif %}\n"
    "{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = (
    "{% if tools %}[TOOLS] {{ tools | tojson }} [/TOOLS]{% endif %}"
    "{% for m in messages %}{% if loop.index0 % 2 and m.role == 'user' %}"
    "{{ raise_exception('turns must alternate') }}{% endif %}"
    "{% set ns = namespace(text=m.content) %}{% if m.role == 'user' %}[INST] {{ ns.text }} [/INST]"
    "{% elif m.role == 'assistant' %}{% generation %} {{ ns.text }}{{ eos_token }}"
    "{% endgeneration %}{% endif %}{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "a<b", "parameters": {"é": ["x", 1, None]}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    train_bpe(["the whale and the sea said über 日本 <tag> \n\n 12"] * 30, 300).save(folder)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>"}
    config |= {"eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("source", [MARKED, TOOLS])
def test_text_tokens_and_masks_equal(folder, tmp_path, source) -> None:
    (tmp_path / "chat_template.jinja").write_text(source)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    template, tokenizer = ChatTemplate.load(tmp_path), load_tokenizer(tmp_path)
    random, rows = np.random.default_rng(0), []

    def said() -> str:
        words = random.choice(["the", "whale", " 日本", "<tag>", "\n", "12", "é"], 12)
        return "".join(words[: random.integers(1, 12)])

    for number in range(40):
        tools = [TOOL] if source is TOOLS and number % 2 else None
        messages = []
        for _ in range(int(random.integers(1, 4))):
            messages += [{"role": "user", "content": said()}]
            messages += [{"role": "assistant", "content": said()}]
        rows.append({"messages": messages, "tools": tools})
        text = theirs.apply_chat_template(messages, tools=tools, tokenize=False)
        assert template.render(messages, tools).text == text
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenize_conversations([tmp_path / "c.jsonl"], tmp_path / "c", tokenizer, template)
    with (
        IndexedDataset(tmp_path / "c_conversation") as texts,
        IndexedDataset(tmp_path / "c_conversation_loss") as masks,
    ):
        for number, row in enumerate(rows):
            expected = theirs.apply_chat_template(
                row["messages"],
                tools=row["tools"],
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            length = len(expected["input_ids"])
            ended = texts.get(number).tolist()
            assert ended[:length] == expected["input_ids"]
            assert ended[length:] in ([], [tokenizer.eod_id])
            mask = expected["assistant_masks"]
            assert masks.get(number).tolist() == mask + [1] * (len(ended) - length)
            assert 0 < sum(mask) < length
