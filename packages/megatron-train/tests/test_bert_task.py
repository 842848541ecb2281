"""Losses of BERT's pretraining, compared with torch's cross entropy of the model's logits."""

from types import SimpleNamespace

import pytest
import torch
from megatron_kernels import Mask
from megatron_models import Bert, BertConfig, Placement
from megatron_parallel import Mesh
from megatron_train.engine import StepEngine
from megatron_train.errors import TrainError
from megatron_train.tasks.bert import BertTask
from megatron_train.tasks.bert_kind import check_bert
from megatron_train.tasks.task import MicroBatch, reported_values
from torch.nn import functional

LENGTH, VOCABULARY = 12, 19


def model(**changes):
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4}
    config = BertConfig(
        **sizes,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        init_method_std=0.2,
        **changes,
    )
    return Bert(config, Placement(Mesh.single(), dtype=torch.float64))


def batch(seed: int, masked: list[int]) -> MicroBatch:
    """Returns padded samples with these numbers of masked tokens."""
    draw = torch.Generator().manual_seed(seed)
    shape = (len(masked), LENGTH)
    tokens, labels = (torch.randint(VOCABULARY, shape, generator=draw) for _ in range(2))
    mask, ids = torch.zeros(shape), torch.zeros(shape, dtype=torch.int32)
    for row, count in enumerate(masked):
        mask[row, torch.randperm(LENGTH - 3, generator=draw)[:count]] = 1
        ids[row, LENGTH - 1 - row :] = -1
    return MicroBatch.from_fields(
        {
            "tokens": tokens,
            "token_types": (torch.arange(LENGTH) > 5).long().expand(shape),
            "labels": labels * mask.long(),
            "loss_mask": mask,
            "document_ids": ids,
            "is_random": torch.randint(2, shape[:1], generator=draw),
            "sample_ids": torch.arange(len(masked)),
        },
        token_field="tokens",
    )


BATCHES = [batch(1, [1, 4]), batch(2, [3]), batch(3, [5, 2, 1])]


def by_hand(bert: Bert, batches: list[MicroBatch]) -> dict[str, torch.Tensor]:
    """Returns the mean losses and the accuracy over some micro-batches, from logits."""
    losses, orders, hits = [], [], []
    for each in batches:
        fields = each.fields
        mask = Mask(causal=False, document_ids=fields["document_ids"])
        types = {"token_types": fields["token_types"]} if bert.config.num_tokentypes else {}
        found = bert(fields["tokens"], mask=mask, **types)
        logits = found.tokens.transpose(0, 1)[..., :VOCABULARY]
        chosen = fields["loss_mask"].bool()
        losses.append(
            functional.cross_entropy(logits[chosen], fields["labels"][chosen], reduction="none")
        )
        if found.sequences is not None:
            swapped = fields["is_random"]
            orders.append(functional.cross_entropy(found.sequences, swapped, reduction="none"))
            hits.append((found.sequences.argmax(1) == swapped).double())
    means = {"lm loss": torch.cat(losses).mean()}
    if orders:
        means |= {"sop loss": torch.cat(orders).mean(), "sop accuracy": torch.cat(hits).mean()}
    return means


@pytest.mark.parametrize("changes", [{}, {"bert_binary_head": False, "num_tokentypes": 0}])
def test_each_loss_has_a_denominator_of_its_own_and_the_gradient_is_that_of_their_sum(changes):
    bert = model(**changes)
    expected = by_hand(bert, BATCHES)
    losses = [value for name, value in expected.items() if "loss" in name]
    gradients = torch.autograd.grad(sum(losses), [*bert.parameters()])
    engine = StepEngine(BertTask([bert], None), Mesh.single())
    denominators = engine.denominators(BATCHES)
    sums = engine.run(BATCHES, denominators, 1)
    assert denominators["lm loss"] == 16 and denominators.get("sop loss", 6) == 6
    found = reported_values(engine.task, {n: float(v) for n, v in sums.items()}, denominators)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value.item(), rel=1e-12), name
    for (name, parameter), gradient in zip(bert.named_parameters(), gradients, strict=True):
        held = parameter.grad if parameter.grad is not None else parameter.main_grad
        torch.testing.assert_close(held.double(), gradient, rtol=1e-9, atol=1e-12, msg=name)


def test_with_equal_micro_batches_each_mean_has_the_same_weight():
    bert = model()
    each = [{n: v.item() for n, v in by_hand(bert, [one]).items()} for one in BATCHES]
    engine = StepEngine(BertTask([bert], None), Mesh.single(), per_token=False)
    denominators = engine.denominators(BATCHES)
    sums = engine.run(BATCHES, denominators, 1)
    for name in ("lm loss", "sop loss"):
        assert denominators[name] == len(BATCHES)
        assert float(sums[name]) == pytest.approx(sum(one[name] for one in each), rel=1e-12)


def test_padding_and_tokens_without_loss_do_not_change_the_losses():
    bert, one = model(), BATCHES[0]
    task = BertTask([bert], None)

    def losses(each: MicroBatch) -> dict[str, float]:
        output = bert(**task.stage_inputs(each, 0, None))
        return {name: value.item() for name, value in task.loss(output, each).items()}

    fields = dict(one.fields)
    fields["tokens"] = fields["tokens"].where(fields["document_ids"] >= 0, 7)
    fields["labels"] = fields["labels"].where(fields["loss_mask"] > 0, 5)
    assert losses(MicroBatch.from_fields(fields, "tokens")) == pytest.approx(losses(one), rel=1e-14)
    fields["token_types"] = 1 - fields["token_types"]
    changed = losses(MicroBatch.from_fields(fields, "tokens"))
    assert changed["lm loss"] != pytest.approx(losses(one)["lm loss"], rel=1e-6)


def test_samples_without_room_for_text_are_refused():
    def check(length, predicts=True):
        check_bert(
            SimpleNamespace(
                model=SimpleNamespace(predicts_tokens=predicts),
                data=SimpleNamespace(seq_length=length),
            )
        )

    check(5)  # [CLS] a [SEP] b [SEP]
    with pytest.raises(TrainError, match=r"--seq-length 4 has no room .* use at least 5"):
        check(4)
    with pytest.raises(TrainError, match="leave out --no-masked-lm-head and --task-head"):
        check(5, predicts=False)
