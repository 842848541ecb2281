"""The fused loss of tasks with masks that leave out some labels, which are tokens all the same."""

import pytest
import torch
from megatron_models import (
    Bert,
    BertConfig,
    EncoderDecoder,
    EncoderDecoderConfig,
    GPTConfig,
    Placement,
    gpt_chunks,
)
from megatron_parallel import Mesh, initialize_parameters
from megatron_parallel.tensor_parallel import UNFUSED_CROSS_ENTROPY, LinearCrossEntropy
from megatron_train.engine import StepEngine
from megatron_train.tasks.bert import BertTask
from megatron_train.tasks.gpt import GPTTask
from megatron_train.tasks.t5 import T5Task
from megatron_train.tasks.task import MicroBatch

SIZES = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 30}
SIZES |= {"max_position_embeddings": 12, "init_method_std": 0.5}
FUSED = [LinearCrossEntropy(4, gradients=when) for when in ("forward", "backward")]
SAMPLES, LENGTH = 3, 6


def batch(task: str, number: int) -> MicroBatch:
    """Returns samples of random labels; one has no label in its mask, one all, one a part."""
    draw = torch.Generator().manual_seed(number)

    def tokens() -> torch.Tensor:
        return torch.randint(30, (SAMPLES, LENGTH), generator=draw)

    mask = torch.zeros(SAMPLES, LENGTH)
    mask[0], mask[1, ::2] = 1, 1
    whole = torch.zeros(SAMPLES, LENGTH, dtype=torch.int32)
    fields = {"labels": tokens(), "loss_mask": mask, "sample_ids": torch.arange(SAMPLES)}
    if task == "t5":
        fields |= {"encoder_tokens": tokens(), "encoder_document_ids": whole}
        fields |= {"decoder_tokens": tokens()}
        return MicroBatch.from_fields(fields, token_field="decoder_tokens")
    places = torch.arange(LENGTH, dtype=torch.int32).expand(SAMPLES, -1)
    fields |= {"tokens": tokens(), "document_ids": whole, "positions": places}
    fields |= {"token_types": whole.long(), "is_random": torch.zeros(SAMPLES, dtype=torch.int64)}
    return MicroBatch.from_fields(fields, token_field="tokens")


def step(task: str, loss: object) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Returns the losses and the gradients of a step of two micro-batches."""
    placement = Placement(Mesh.single(), dtype=torch.float64, vocabulary_loss=loss)
    if task == "bert":
        made = BertTask([Bert(BertConfig(**SIZES), placement)], None)
    elif task == "t5":
        made = T5Task([EncoderDecoder(EncoderDecoderConfig(**SIZES), placement)], None)
    else:
        future = {"mtp_num_layers": 2} if task == "gpt, future tokens" else {}
        made = GPTTask(gpt_chunks(GPTConfig(**SIZES, **future), placement), None)
    for stage in made.stages:
        initialize_parameters(stage, seed=1, mesh=Mesh.single())
    engine = StepEngine(made, Mesh.single())
    batches = [batch(task, number) for number in (1, 2)]
    sums = engine.run(batches, engine.denominators(batches), 1)
    gradients = {name: each.clone() for name, each in engine.stages.gradients().items()}
    return {name: float(value) for name, value in sums.items()}, gradients


@pytest.mark.parametrize("task", ["gpt", "gpt, future tokens", "bert", "t5"])
def test_a_fused_loss_leaves_out_what_the_mask_leaves_out(task: str) -> None:
    losses, gradients = step(task, UNFUSED_CROSS_ENTROPY)
    for fused in FUSED:
        found, others = step(task, fused)
        assert found == pytest.approx(losses, rel=1e-12)
        torch.testing.assert_close(others, gradients, rtol=1e-10, atol=1e-13)
