"""Sources of the samples of tasks: tokens that a model has, corpora that fit, and settings."""

import json
import re
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
from megatron_data import (
    ByteTokenizer,
    DataError,
    IndexedDatasetBuilder,
    load_tokenizer,
    train_bpe,
)
from megatron_data.datasets import FIMConfig
from megatron_data.tokenizers import bert_tokenizer
from megatron_models import GPTConfig
from megatron_optim import OptimizerConfig
from megatron_train import DataConfig, EvaluationConfig, RunConfig, TrainError, TrainingConfig
from megatron_train.mock_data import MockDataset
from megatron_train.tasks.bert_data import BertData
from megatron_train.tasks.classification_data import ClassificationData
from megatron_train.tasks.classification_settings import ClassificationSettings
from megatron_train.tasks.gpt_data import GPTData
from megatron_train.tasks.masking import MaskingSettings
from megatron_train.tasks.t5_data import T5Data
from megatron_train.tasks.t5_kind import SpanSettings

VOCABULARY = 40
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "##c"]


def gpt(tokenizer=None, vocab_size=VOCABULARY, fim=None, **data):
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    config = RunConfig(
        model=GPTConfig(**sizes, vocab_size=vocab_size, max_position_embeddings=8),
        data=DataConfig(**{"seq_length": 8, "mock_data": not data.get("data_path"), **data}),
        training=TrainingConfig(train_iters=3, micro_batch_size=2),
        optimizer=OptimizerConfig(lr=1e-4),
        evaluation=EvaluationConfig(eval_iters=0),
        extension_settings={} if fim is None else {"fim": fim},
    )
    return GPTData(config, tokenizer)


@pytest.fixture
def pieces(tmp_path):
    """Returns the path of a vocabulary of word pieces."""
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    return tmp_path / "vocab.txt"


def of_texts(kind, pieces, prefix="p", classes=None, **data):
    """Returns a source of sentences or labelled texts."""
    words = {"tokenizer_type": "BertWordPieceCase", "vocab_file": str(pieces)}
    config = DataConfig(8, data_path=(str(prefix),), sample_order="compat", **words | data)
    sections = (
        MaskingSettings(),
        SpanSettings(),
        ClassificationSettings(("text",), "label", classes, 3),
    )
    model = SimpleNamespace(embedding=SimpleNamespace(vocab_size=VOCABULARY), bert_binary_head=True)
    run = SimpleNamespace(
        task="mine", data=config, model=model, training=TrainingConfig(1, train_iters=1)
    )
    run.section = {type(section): section for section in sections}.__getitem__
    extra = config.vocab_extra_ids or 0
    return kind(run, bert_tokenizer(pieces, lower_case=False, extra_ids=extra))


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (GPTData, ("tokens", "labels")),
        (BertData, ("tokens", "labels")),
        (T5Data, ("encoder_tokens", "decoder_tokens", "labels")),
        (ClassificationData, ("tokens",)),
    ],
)
def test_every_token_must_be_in_the_vocabulary(kind, names, pieces):
    data = gpt() if kind is GPTData else of_texts(kind, pieces)
    held = {name: np.array([0, VOCABULARY - 1]) for name in names}
    fields = data.read([held], [0])
    assert all(values.tolist() == [[0, VOCABULARY - 1]] for values in fields.values())
    batch = data.micro_batch(fields)
    assert (batch.samples, batch.tokens) == (1, 2)
    for name in names:
        more = held | {name: np.array([VOCABULARY, 1])}
        with pytest.raises(DataError, match=r"token 40, but the vocabulary (of the model )?has 40"):
            data.read([held, more], [0, 1])


@pytest.mark.parametrize("kind", [BertData, ClassificationData])
def test_texts_need_a_tokenizer(kind):
    with pytest.raises(TrainError, match="needs a tokenizer; give --"):
        kind(SimpleNamespace(task="mine"), None)


def test_samples_are_identified_by_all_settings_but_the_length_of_the_run(pieces):
    plain = {"order": "stateless", "reset_position_ids": False, "reset_attention_mask": False}
    plain |= {"sft": False, "fim": None, "written": None}
    assert gpt(sample_order="stateless").identity() == plain
    masking = {"mask_prob": 0.15, "short_seq_prob": 0.1, "mask_max_ngram": 3}
    masking |= {"mask_whole_words": True, "mask_longer_ngrams": False}
    masking |= {"mask_geometric": False, "mask_permutation": False}
    compat = {"order": "compat", **masking}
    assert of_texts(BertData, pieces).identity() == {**compat, "sentence_pairs": True}
    spans = {"mask_max_ngram": 10, "mask_geometric": True, "decoder_seq_length": 128}
    assert of_texts(T5Data, pieces).identity() == compat | spans
    columns = {"text_columns": ("text",), "label_column": "label", "class_names": None}
    assert of_texts(ClassificationData, pieces).identity() == columns


@pytest.fixture
def corpus(tmp_path):
    """Returns a function that writes 6 documents of 4 or given tokens, made with a tokenizer."""

    def write(name, tokenizer, tokens=None):
        prefix = str(tmp_path / name)
        with IndexedDatasetBuilder(prefix, "uint16") as builder:
            for start in range(6):
                document = tokens or [start, start + 1, start + 2, 256]
                builder.add_document(document, [len(document)])
            builder.finalize()
        manifest = {"format": "megatron-data manifest 1", "counts": {}, "sources": [], "files": {}}
        manifest["tokenizer"] = {"fingerprint": tokenizer.fingerprint}
        (tmp_path / f"{name}.meta.json").write_text(json.dumps(manifest))
        return prefix

    return write


def test_a_corpus_of_another_tokenizer_is_refused_unless_allowed(corpus, pieces):
    other, own = corpus("other", bert_tokenizer(pieces)), corpus("own", ByteTokenizer())
    tokenizer = {"tokenizer_type": "ByteTokenizer"}

    def check(prefix, **more):
        gpt(ByteTokenizer(), data_path=(prefix,), **tokenizer, **more).check()

    check(own)
    check(other, allow_tokenizer_mismatch=True)
    with pytest.raises(TrainError, match=r"other was made with .*, or give --allow-tokenizer-mism"):
        check(other)
    gpt(ByteTokenizer(), **tokenizer).check()  # synthetic samples


def test_a_corpus_of_spans_may_have_been_made_without_sentinels(corpus, pieces):
    plain = bert_tokenizer(pieces, lower_case=False)
    extended = bert_tokenizer(pieces, lower_case=False, extra_ids=2)
    lower = bert_tokenizer(pieces)
    paths = {n: corpus(n, t) for n, t in (("p", plain), ("e", extended), ("l", lower))}

    def check(name, kind=T5Data, **more):
        of_texts(kind, pieces, paths[name], **more).check()

    check("p", vocab_extra_ids=2)
    check("e", vocab_extra_ids=2)
    check("p", BertData)
    check("l", BertData, allow_tokenizer_mismatch=True)
    refused = (("l", T5Data, 2, extended), ("l", T5Data, None, plain), ("e", T5Data, None, plain))
    for name, kind, extra, own in (*refused, ("e", BertData, None, plain)):
        shown = own.fingerprint[:19]  # that of the run, not that without sentinels
        with pytest.raises(TrainError, match=f"not with {shown}; .*--allow-tokenizer-mismatch"):
            check(name, kind, vocab_extra_ids=extra)


@pytest.mark.parametrize("order", ["stateless", "compat"])
def test_documents_end_with_the_tokenizers_token_and_indices_have_a_folder(corpus, tmp_path, order):
    cache = {"data_cache_path": str(tmp_path / "cache")} if order == "compat" else {}
    words = {"tokenizer_type": "ByteTokenizer", "sample_order": order, "split": "1,0,0"}
    prefix = corpus("text", ByteTokenizer())
    data = gpt(ByteTokenizer(), 257, data_path=(prefix,), reset_position_ids=True, **words, **cache)
    train, valid, test = data.datasets((3, 0, 0))
    assert (valid, test) == (None, None) and len(train) >= 3
    sample = train[0]
    place, expected = 0, []
    for token in sample["tokens"].tolist():
        expected.append(place)
        place = 0 if token == 256 else place + 1
    assert sample["positions"].tolist() == expected and max(expected) <= 3
    assert (tmp_path / "cache").exists() == (order == "compat")


def test_conversations_are_read_by_a_template_that_identifies_them(tmp_path):
    folder, lines = tmp_path / "tokenizer", tmp_path / "talks.jsonl"
    train_bpe(["the whale sees a ship"] * 3, 270).save(folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    said = [{"role": role, "content": "the whale"} for role in ("user", "assistant")]
    lines.write_text(f"{json.dumps({'messages': said})}\n" * 3)
    words = {"sft": True, "reset_position_ids": True, "reset_attention_mask": True}
    words |= {"tokenizer_model": str(folder), "sample_order": "compat", "split": "1,0,0"}

    def talks(**limits):
        data = gpt(load_tokenizer(folder), 300, data_path=(str(lines),), **words, **limits)
        return data, data.datasets((1, 0, 0)).train[0]

    data, sample = talks()
    assert len(sample["tokens"]) == 8
    (written,) = data.identity()["written"].items()
    assert written[0] == "template" and re.fullmatch("sha256:[0-9a-f]{12}", written[1])
    assert "changes" not in data.identity()
    for limit, message in (
        ("max_document_bytes", "a document of "),
        ("max_template_steps", "--max-template-steps"),
        ("max_template_characters", "--max-template-characters"),
    ):
        talks(**{limit: 10_000})
        with pytest.raises(DataError, match=message):
            talks(**{limit: 5})


def test_documents_are_rearranged_on_request(corpus, pieces):
    tokenizer = bert_tokenizer(pieces, lower_case=False)
    tokens = {"prefix_token": "[CLS]", "middle_token": "[MASK]", "suffix_token": "[SEP]"}
    fim = FIMConfig(rate=1.0, **tokens)
    words = {"tokenizer_type": "BertWordPieceCase", "vocab_file": str(pieces), "split": "1,0,0"}
    letters = [5, 6, 6, 5, 6, 5, tokenizer.eod_id]
    words |= {"data_path": (corpus("text", tokenizer, letters),)}
    added = {2, 3, 4}  # lines of the vocabulary
    for given in (True, False):
        data = gpt(tokenizer, 300, fim if given else None, fim_data=given, **words)
        assert data.identity()["fim"] == (asdict(fim) if given else None)
        seen = {n for i in range(4) for n in data.datasets((4, 0, 0)).train[i]["tokens"].tolist()}
        assert added & seen == (added if given else set())


@pytest.mark.parametrize("names", [("good", "bad"), ("bad", "good")])
def test_labels_have_the_numbers_of_their_class_names(pieces, tmp_path, names):
    path = tmp_path / "texts.tsv"
    path.write_text("text\tlabel\na\tgood\nb\tbad\n")
    data = of_texts(ClassificationData, pieces, path, names, split="1,0,0")
    train, valid, test = data.datasets((4, 0, 0))
    assert (valid, test) == (None, None) and len(train) >= 4
    for number in range(4):
        label = "good" if WORDS.index("a") in train[number]["tokens"] else "bad"
        assert names[int(train[number]["classes"])] == label


def test_synthetic_samples_count_up_from_a_random_token():
    data = gpt()
    train, valid, test = data.datasets((5, 0, 3))
    assert valid is None and (len(train), len(test)) == (5, 3)
    firsts = set()
    for number in range(5):
        sample = train[number]
        first = int(sample["tokens"][0])
        firsts.add(first)
        assert sample["tokens"].tolist() == [(first + i) % VOCABULARY for i in range(8)]
        assert sample["labels"].tolist() == [(first + i + 1) % VOCABULARY for i in range(8)]
        assert sample["loss_mask"].tolist() == [1.0] * 8
        assert sample["positions"].tolist() == [*range(8)]
        assert sample["document_ids"].tolist() == [0] * 8
        assert sample["sample_ids"] == number and sample["sample_ids"].dtype == np.int64
    assert len(firsts) > 1
    assert data.datasets((0, 2, 0)).train is None


def test_synthetic_samples_depend_on_seed_split_and_number_alone():
    def firsts(**changes):
        made = replace(MockDataset(50, 4, 1000, seed=3, split=0), **changes)
        return [int(made[number]["tokens"][0]) for number in range(len(made))]

    every = firsts()
    assert firsts(samples=9, sequence_length=2) == every[:9]
    assert max(every) < 1000 and len(set(every)) > 30
    assert firsts(seed=4) != every != firsts(split=1)
    assert {int(MockDataset(1, 1, 1, 3, 0)[0][name][0]) for name in ("tokens", "labels")} == {0}
    train, valid, _ = gpt().datasets((1, 1, 0))
    assert (train.split, valid.split) == (0, 1)
    assert train.seed == 1234
