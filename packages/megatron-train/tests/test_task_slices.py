"""What a rank of a job gives its stages: parts of sequences, positions, dropout, and counts."""

from types import SimpleNamespace

import pytest
import torch
from megatron_models import (
    BertConfig,
    EncoderDecoderConfig,
    EncoderOutput,
    GPTConfig,
    encoder_decoder_flops,
    training_flops,
)
from megatron_parallel import DropoutKey, Mesh, ParallelLayout
from megatron_parallel.context_parallel import ContextSplit
from megatron_train.errors import TrainError
from megatron_train.tasks.bert import BertTask
from megatron_train.tasks.classification import ClassificationTask
from megatron_train.tasks.gpt import GPTTask, gpt_task
from megatron_train.tasks.t5 import T5Task
from megatron_train.tasks.task import MicroBatch, field_sum, labels_with_loss

SIZES = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 30}
SIZES |= {"max_position_embeddings": 16}
SECOND = Mesh(ParallelLayout(cp=2, dp=1), 1)
"""The second of two context-parallel ranks, which has the second and third quarter."""
POOL = Mesh(ParallelLayout(dp=2, hybrid_cp=True), 1)
LENGTH = 8


class Stage:
    """Stands for a stage of a model, and returns what it is asked for."""

    def __init__(self, config, mesh, stage=0, last=True, units=()):
        self.config, self.mesh, self.stage = config, mesh, stage
        self.first, self.last, self.parts = stage == 0, last, units

    def stage_output_spec(self, *given):
        return given

    def units(self):
        return self.parts


def gpt(mesh=SECOND, config=None, **options):
    return GPTTask([Stage(config or GPTConfig(**SIZES), mesh)], None, **options)


def batch(**fields):
    """Returns two samples with the tokens 0 … 7 and 10 … 17, the first with 5 tokens."""
    tokens = torch.tensor([[*range(8)], [*range(10, 18)]])
    ids = torch.tensor([[0] * 3 + [1] * 2 + [-1] * 3, [0] * 8], dtype=torch.int32)
    shared = {"document_ids": ids, "loss_mask": (ids >= 0).float(), "labels": tokens + 1}
    shared |= {"tokens": tokens, "positions": tokens % 10, "sample_ids": torch.tensor([4, 9])}
    shared |= {"token_types": tokens * 3, "is_random": torch.tensor([0, 1])}
    return MicroBatch.from_fields(shared | fields, token_field="tokens")


def test_a_rank_has_its_part_of_a_sequence_and_whole_documents():
    ours, whole = gpt().context_parallel_slice(batch()).fields, batch().fields
    for name in ("tokens", "labels", "loss_mask", "positions"):
        assert torch.equal(ours[name], whole[name][:, 2:6]), name
    assert torch.equal(ours["document_ids"], whole["document_ids"])
    assert torch.equal(ours["sample_ids"], whole["sample_ids"])


def test_a_split_knows_documents_that_are_separate():
    """Without them, a ring of ranks waits for the device to learn which blocks it needs."""
    assert gpt().context_parallel_slice(batch()).context_split.host is None
    split = gpt(reset_attention_mask=True).context_parallel_slice(batch()).context_split
    assert torch.equal(split.host.document_ids, batch().fields["document_ids"])
    assert split.indices.tolist() == [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]


def test_each_document_may_be_split_by_itself():
    ids = torch.tensor([[0] * 4 + [1] * 4])
    one = batch(document_ids=ids, tokens=torch.arange(8)[None])
    fields = {name: one.fields[name][:1] for name in ("tokens", "labels", "document_ids")}
    ours = gpt(split_per_document=True).context_parallel_slice(MicroBatch(fields, 1, 8))
    assert ours.fields["tokens"].tolist() == [[1, 2, 5, 6]]


@pytest.mark.parametrize(
    ("split", "first"), [("zigzag", [2, 3, 4, 5]), ("per_document", [1, 2, 5, 6])]
)
def test_the_split_of_a_sequence_is_that_of_the_run(split, first):
    settings = {"seed": 1, "hidden_dropout": 0.0, "attention_dropout": 0.0, "seq_length": LENGTH}
    settings |= {"reset_position_ids": False, "reset_attention_mask": True}
    part = SimpleNamespace(**settings, context_parallel_split=split, moe_per_layer_logging=False)
    run = SimpleNamespace(training=part, data=part, placement=part, logging=part)
    task = gpt_task(run, [Stage(GPTConfig(**SIZES), SECOND)], None)
    ids = torch.tensor([[0] * 4 + [1] * 4] * 2)
    assert (
        task.context_parallel_slice(batch(document_ids=ids)).fields["tokens"][0].tolist() == first
    )


@pytest.mark.parametrize("kind", [BertTask, ClassificationTask])
def test_an_encoder_cuts_tokens_and_their_types(kind):
    classes = (2,) if kind is ClassificationTask else ()
    task, whole = kind([Stage(BertConfig(**SIZES), SECOND)], None, *classes), batch()
    ours = task.context_parallel_slice(whole)
    cut = {"tokens", "token_types"} | ({"labels", "loss_mask"} if kind is BertTask else set())
    for name, values in whole.fields.items():
        assert torch.equal(ours.fields[name], values[:, 2:6] if name in cut else values), name
    assert torch.equal(ours.context_split.host.document_ids, whole.fields["document_ids"])
    given = ContextSplit(torch.tensor([[[0, 2, 4, 6]], [[1, 3, 5, 7]]]))
    ours = task.context_parallel_slice(MicroBatch(whole.fields, 2, 16, given))
    assert torch.equal(ours.fields["tokens"], whole.fields["tokens"][:, 1::2])
    inputs = task.stage_inputs(ours, 0, None)
    assert inputs["split"] is given and torch.equal(inputs["x"], ours.fields["tokens"])
    assert torch.equal(inputs["token_types"], ours.fields["token_types"])
    assert not inputs["mask"].causal
    assert torch.equal(inputs["mask"].document_ids, whole.fields["document_ids"])


def test_a_decoder_that_classifies_has_a_causal_mask_and_no_token_types():
    task = ClassificationTask([Stage(GPTConfig(**SIZES), Mesh.single())], None, 2)
    inputs = task.stage_inputs(batch(), 0, None)
    assert inputs["mask"].causal and inputs.keys() == {"mask", "x"}
    later = ClassificationTask([Stage(GPTConfig(**SIZES), Mesh.single(), 1)], None, 2)
    assert later.stage_inputs(batch(), 1, None).keys() == {"mask"}


def test_sums_over_sequences_count_on_the_first_rank_of_a_context_only():
    output = EncoderOutput(torch.ones(2, 8), torch.tensor([[3.0, 1.0], [0.0, 2.0]]))
    whole = batch(classes=torch.tensor([0, 1]), weights=torch.tensor([1, 1]))
    for rank, hits in enumerate((2, 0)):
        mesh = Mesh(ParallelLayout(cp=2, dp=1), rank)
        bert = BertTask([Stage(BertConfig(**SIZES), mesh)], None)
        found = bert.loss(output, whole)
        assert found["lm loss"] == 5 + 8 and found["sop accuracy"] == hits
        assert (found["sop loss"] > 0) == (hits > 0)
        other = ClassificationTask([Stage(BertConfig(**SIZES), mesh)], None, 2)
        assert other.loss(output, whole)["accuracy"] == hits


def test_positions_of_a_batch_are_used_only_if_documents_reset_them():
    assert "positions" not in gpt().stage_inputs(batch(), 0, None)
    task = gpt(reset_position_ids=True)
    found = task.stage_inputs(batch(), 0, None)["positions"]
    assert torch.equal(found, batch().fields["positions"])
    axes = torch.arange(48).view(2, 8, 3)  # time, height and width of each token
    found = task.stage_inputs(batch(positions=axes), 0, None)["positions"]
    assert found.shape == (3, 2, 8) and found[1, 0].tolist() == [*range(1, 25, 3)]


def test_documents_are_masked_only_if_tokens_attend_within_their_own():
    assert "mask" not in gpt().stage_inputs(batch(), 0, None)
    mask = gpt(reset_attention_mask=True).stage_inputs(batch(), 0, None)["mask"]
    assert mask.causal and torch.equal(mask.document_ids, batch().fields["document_ids"])


def test_a_rank_of_a_pool_attends_over_the_ranks_of_its_row():
    task = gpt(POOL)
    ids = batch().fields["document_ids"][1:]
    row = {name: values[1:] for name, values in batch().fields.items()}
    for ranks, own, name in ((2, slice(2, 6), "hybrid_cp_2"), (1, slice(8), "hybrid_cp_1")):
        split = ContextSplit.per_document(ids, ranks)
        part = task.context_parallel_slice(MicroBatch(row, 1, 8, split))
        assert torch.equal(part.fields["tokens"], row["tokens"][:, own])
        found = task.stage_inputs(part, 0, None)
        assert found["cp"] is POOL.axis(name) and found["split"] is split
        assert torch.equal(found["positions"], part.fields["positions"])
        assert torch.equal(found["mask"].document_ids, ids)
    split = ContextSplit.zigzag(LENGTH, 2)
    outside = gpt().stage_inputs(MicroBatch(batch().fields, 2, 16, split), 0, None)
    assert outside["split"] is split and "cp" not in outside


def test_rows_of_a_pool_drop_what_their_samples_drop():
    task = gpt(POOL, seed=7, hidden_dropout=0.25, attention_dropout=0.5, sequence_length=20)
    origin = {
        "sample_ids": torch.tensor([[4, 4, 9]]),
        "indices_in_sample": torch.tensor([[0, 1, 6]]),
    }
    fields = origin | {"tokens": torch.zeros(1, 3, dtype=torch.int64)}
    fields |= {"positions": fields["tokens"], "document_ids": fields["tokens"]}
    fields |= {"labels": fields["tokens"], "loss_mask": torch.ones(1, 3)}
    row = MicroBatch(fields, 1, 3)
    found = task.stage_inputs(row, 0, 3)["dropout"]
    whole = DropoutKey.for_batch(seed=7, iteration=3, samples=torch.tensor([4, 9]), positions=20)
    assert found.key.word0[:, 0].tolist() == whole.word0[[0, 1, 6], [0, 0, 1]].tolist()
    assert (found.hidden, found.attention, found.length) == (0.25, 0.5, 20)
    assert found.indices.tolist() == [[0, 1, 6]]
    assert "dropout" not in task.stage_inputs(row, 0, None)
    assert "dropout" not in gpt(POOL).stage_inputs(row, 0, 3)


@pytest.mark.parametrize("seed", [None, 5])
def test_a_ranks_key_of_dropout_is_that_of_whole_sequences(seed):
    """The default seed is Megatron's."""
    rates = {"hidden_dropout": 0.1} | ({} if seed is None else {"seed": seed})
    task = gpt(**rates)
    part = task.context_parallel_slice(batch())
    key = task.stage_inputs(part, 0, 2)["dropout"].key
    samples = torch.tensor([4, 9])
    whole = DropoutKey.for_batch(seed=seed or 1234, iteration=2, samples=samples, positions=LENGTH)
    assert torch.equal(key.word0, whole.word0) and torch.equal(key.word1, whole.word1)
    assert "dropout" not in gpt().stage_inputs(part, 0, 2)
    encoder = BertTask([Stage(BertConfig(**SIZES), Mesh.single())], None, **rates)
    assert torch.equal(encoder.stage_inputs(batch(), 0, 2)["dropout"].key.word0, whole.word0)


@pytest.mark.parametrize("smoothing", [0.0, 0.25])
def test_labels_are_smoothed_in_training_steps_only(smoothing):
    task = gpt(Mesh.single(), label_smoothing=smoothing) if smoothing else gpt(Mesh.single())
    assert task.stage_inputs(batch(), 0, 1)["label_smoothing"] == smoothing
    assert "label_smoothing" not in task.stage_inputs(batch(), 0, None)


def test_the_first_stage_has_tokens_and_the_last_labels():
    config = GPTConfig(**SIZES)
    stages = [Stage(config, SECOND, n, last=n == 3, units=[f"block {n}"]) for n in (0, 1, 3)]
    task = GPTTask(stages, None)
    assert task.stage_inputs(batch(), 0, None).keys() == {"x"}
    assert not task.stage_inputs(batch(), 1, None)
    last = task.stage_inputs(batch(), 3, None)
    assert last.keys() == {"labels"} and last["labels"][0].tolist() == [1, 2, 3, 4, 5] + [-100] * 3
    assert [task.fsdp_units(stage) for stage in stages] == [["block 0"], ["block 1"], ["block 3"]]
    part = task.context_parallel_slice(batch())
    assert task.stage_output_spec(part, 1) == (2, LENGTH)  # of whole sequences
    assert gpt().stage_output_spec(part, 0) == (2, LENGTH)


EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 8, "moe_aux_loss_coeff": 0.1}
EXPERTS |= {"moe_router_load_balancing_type": "aux_loss", "mtp_num_layers": 2}


@pytest.mark.parametrize(
    ("separate", "routed", "future"), [(False, 16, (11, 9)), (True, 13, (2 + 1 + 7, 1 + 0 + 6))]
)
def test_denominators_of_routers_and_of_tokens_that_follow(separate, routed, future):
    """Of documents of 3, 2 and 8 tokens, the first two in a sample with 3 tokens of padding."""
    task = gpt(config=GPTConfig(**SIZES, **EXPERTS), reset_attention_mask=separate)
    fields = batch().fields
    rows = [
        MicroBatch({name: values[n : n + 1] for name, values in fields.items()}, 1, 8)
        for n in range(2)
    ]
    names = ("mtp_1 loss", "mtp_2 loss")
    expected = {
        "lm loss": 13,
        "load_balancing_loss": routed,
        **dict(zip(names, future, strict=True)),
    }
    found = task.denominators(rows)
    assert found == task.denominators([batch()]) == expected
    assert {type(count) for count in found.values()} == {float}  # nothing to wait for
    assert task.auxiliary_losses == ("load_balancing_loss", *names)
    assert gpt().denominators(rows) == {"lm loss": 13} and gpt().auxiliary_losses == ()


def test_tokens_that_follow_are_those_of_the_whole_sequence_on_each_rank():
    config = GPTConfig(**SIZES, mtp_num_layers=1)
    assert "future_tokens" not in gpt().context_parallel_slice(batch()).fields
    part = gpt(config=config).context_parallel_slice(batch())
    assert part.fields["future_tokens"][..., 0].tolist() == [[3, 4, 5, 6], [13, 14, 15, 16]]
    assert part.fields["future_positions"][..., 0].tolist() == [[3, 4, 5, 6]] * 2
    future = gpt(config=config).stage_inputs(part, 0, 1)["future"]
    assert future.labels[..., 0].tolist() == [[4, 5, -100, -100], [14, 15, 16, 17]]
    assert "future" not in gpt(config=config).stage_inputs(part, 0, None)
    own = torch.arange(8, dtype=torch.int32) + 5
    moved = batch(positions=own.expand(2, -1))
    part = gpt(config=config).context_parallel_slice(moved)
    assert part.fields["future_positions"][0, :, 0].tolist() == [3, 4, 5, 6]
    part = gpt(config=config, reset_position_ids=True).context_parallel_slice(moved)
    assert part.fields["future_positions"][0, :, 0].tolist() == [8, 9, 10, 11]
    separate = gpt(config=config, reset_attention_mask=True).context_parallel_slice(batch())
    assert separate.fields["future_tokens"][0, :3, 0].tolist() == [0, 4, 0]


def test_flops_are_those_of_all_tokens_in_sequences_of_their_length():
    batches = [batch(), batch(), batch()]
    config, encoder = GPTConfig(**SIZES), BertConfig(**SIZES)
    assert gpt().flops(batches) == training_flops(config, LENGTH, 48)
    assert gpt(POOL, sequence_length=16).flops(batches) == training_flops(config, 16, 48)
    bert = BertTask([Stage(encoder, SECOND)], None)
    assert bert.flops(batches) == training_flops(encoder, LENGTH, 48)
    assert gpt().flops(batches[:1]) == training_flops(config, LENGTH, 16)
    assert bert.flops(batches[:1]) == training_flops(encoder, LENGTH, 16)
    assert training_flops(config, 16, 48) > training_flops(config, LENGTH, 48)


def test_t5_reads_two_texts_of_their_lengths():
    config = EncoderDecoderConfig(**SIZES)
    task = T5Task([Stage(config, Mesh.single())], None, hidden_dropout=0.1)
    ids = torch.tensor([[0, 0, 0, -1], [0, 0, 0, 0]], dtype=torch.int32)
    fields = {"encoder_tokens": torch.arange(8).view(2, 4), "encoder_document_ids": ids}
    fields |= {"decoder_tokens": torch.arange(12).view(2, 6), "sample_ids": torch.tensor([4, 9])}
    fields |= {"labels": torch.ones(2, 6, dtype=torch.int64), "loss_mask": torch.ones(2, 6)}
    one = MicroBatch.from_fields(fields, "encoder_tokens")
    found = task.stage_inputs(one, 0, 2)
    assert found["source_padding"].tolist() == [[False] * 3 + [True], [False] * 4]
    whole = DropoutKey.for_batch(seed=1234, iteration=2, samples=fields["sample_ids"], positions=6)
    assert torch.equal(found["dropout"].key.word0, whole.word0)  # of the longer text
    assert task.stage_output_spec(one, 1) == (1, 2, 4, 6)
    assert task.flops([one]) == encoder_decoder_flops(config, 4, 6, 2)
    assert task.flops([one, one]) == encoder_decoder_flops(config, 4, 6, 4)
    assert task.denominators([one, one]) == {"lm loss": 24}
    early = T5Task([Stage(config, Mesh.single(), last=False)], None)
    assert "labels" not in early.stage_inputs(one, 0, 2)
    with pytest.raises(TrainError, match="does not cut sequences; give --context-parallel-size 1"):
        task.context_parallel_slice(one)
    wrong = T5Task([Stage(SimpleNamespace(kind="gpt"), Mesh.single())], None)
    with pytest.raises(TrainError, match="the task t5 trains models of kind t5, not gpt"):
        wrong.flops([one])


def test_sums_of_host_fields_are_numbers():
    found = field_sum([batch(), batch()], "loss_mask")
    assert type(found) is float and found == 26
    assert labels_with_loss(batch().fields)[0].tolist() == [1, 2, 3, 4, 5, -100, -100, -100]
    fields = {f"future_{name}": batch().fields[name] for name in ("labels", "loss_mask")}
    assert labels_with_loss(fields, "future_")[0, -1] == -100
