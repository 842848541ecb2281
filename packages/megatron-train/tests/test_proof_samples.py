"""Synthetic samples of proofs: each has the properties that a proof needs."""

import pytest
import torch
from megatron_train.cli.main import build_parser
from megatron_train.config.described_run import resolve_run
from megatron_train.prove.samples import (
    documents,
    padded,
    segments,
    source_and_target,
    stacked,
    with_axes,
)
from megatron_train.tasks.kinds import find_task_kind

LENGTH = 32


@pytest.mark.parametrize("index", range(9))
def test_padding_of_a_sample_depends_on_its_number(index):
    row = documents(index, LENGTH)
    cut = padded(row)
    end = LENGTH - {0: 0, 1: 3, 2: 6, 3: 9}[index % 4]
    assert (cut["document_ids"] >= 0).tolist() == [True] * end + [False] * (LENGTH - end)
    assert torch.equal(cut["document_ids"][:end], row["document_ids"][:end])
    assert torch.equal(cut["loss_mask"][:end], row["loss_mask"][:end])
    assert not cut["loss_mask"][end:].any()
    assert all(torch.equal(cut[name], row[name]) for name in ("tokens", "labels", "positions"))


def test_a_short_sample_keeps_a_token():
    assert (padded(documents(3, 4))["document_ids"] >= 0).tolist() == [True, False, False, False]


def test_documents_start_again_at_position_0_and_labels_are_the_next_tokens():
    for index in range(20):
        row = documents(index, LENGTH, 60)
        starts = row["positions"] == 0
        assert starts[0] and torch.equal(row["document_ids"], (starts.cumsum(0) - 1).int())
        inside = ~starts[1:]
        assert torch.equal(row["positions"][1:][inside], row["positions"][:-1][inside] + 1)
        assert torch.equal(row["tokens"][1:], row["labels"][:-1])
        assert row["tokens"].min() >= 0 and row["tokens"].max() < 60
        assert bool(row["loss_mask"].any()) == (index % 7 != 3)


@pytest.mark.parametrize(
    ("words", "pads"),
    [
        ("gpt --recipe llama-tiny", False),  # documents keep padding out of attention
        ("gpt --recipe deepseek-tiny", True),  # experts would read it
        ("mamba --recipe mamba2-tiny", True),  # a state would go on into it
        ("bert --recipe bert-tiny", True),
    ],
)
def test_samples_end_in_padding_where_it_could_have_an_effect(words, pads):
    run = resolve_run(build_parser().parse_args(["prove", *words.split()]))
    data = find_task_kind(run.task).open_proof_data(run)
    row = data.sample(1)
    ids = row["document_ids"]
    assert len(row["tokens"]) == run.data.seq_length
    assert (ids == -1).sum() == (3 if pads else 0) and bool((ids[-3:] == -1).all()) == pads
    assert row["tokens"].max() < run.model.embedding.vocab_size


def test_positions_with_axes_are_random_and_those_of_the_sample():
    one, other = (with_axes(documents(index, LENGTH)) for index in (1, 2))
    assert one["positions"].shape == (LENGTH, 3) and one["positions"].dtype == torch.int32
    assert one["positions"].min() >= 0 and one["positions"].max() < LENGTH
    assert not torch.equal(one["positions"], other["positions"])
    assert torch.equal(one["positions"], with_axes(documents(1, LENGTH))["positions"])
    assert len(one["positions"].unique()) > LENGTH / 2


@pytest.mark.parametrize("index", [0, 1, 2, 4, 5, 7, 8])
def test_samples_have_a_loss_for_a_fifth_to_nine_tenths_of_their_tokens(index):
    share = documents(index, 4096)["loss_mask"].mean().item()
    assert share == pytest.approx(0.2 + 0.1 * (index % 8), abs=0.03)


def test_half_of_a_text_is_one_token():
    text = stacked([documents(index, 256, 150) for index in range(40)])
    assert (text["tokens"] == 117).float().mean().item() == pytest.approx(0.5, abs=0.02)
    assert text["loss_mask"].mean().item() == pytest.approx(0.5, abs=0.1)
    assert (text["positions"] == 0).float().mean().item() == pytest.approx(0.2, abs=0.02)


@pytest.mark.parametrize("index", [0, 1, 2, 7, 9])
def test_segments_orders_classes_and_weights(index):
    row = padded(documents(index, LENGTH))
    made = segments(row)
    assert made["token_types"].tolist() == [int(i > 4 + index % 7) for i in range(LENGTH)]
    assert made["is_random"] == made["classes"] == index % 2
    assert made["weights"] == float(index not in (2, 7))
    assert made["document_ids"].tolist() == (-(row["document_ids"] < 0).int()).tolist()


def test_an_encoder_decoder_has_the_source_with_padding_and_the_start_of_the_target():
    source, target = padded(documents(1, LENGTH)), documents(501, LENGTH)
    made = source_and_target(source, target, 10)
    assert torch.equal(made["encoder_tokens"], source["tokens"])
    assert made["encoder_document_ids"].tolist() == [0] * 29 + [-1] * 3
    for name in ("tokens", "labels", "loss_mask"):
        ours = "decoder_tokens" if name == "tokens" else name
        assert torch.equal(made[ours], target[name][:10])
