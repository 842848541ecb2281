"""The stages of a model on this rank, run as one model.

A pass goes through all stages of the pipeline in the order of the model, for every mapping of
stages to ranks: one stage on each rank, several interleaved ones, or a V. The ranks of the tensor-
and context-parallel axes run the same stages on the same tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Float, Shaped
from megatron_models import DecodingModel, DecodingPass
from megatron_parallel import broadcast
from megatron_parallel.collectives import receive, send
from torch import Tensor, nn

from megatron_infer.errors import InferError

AnyModel = DecodingModel | Sequence[nn.Module]
"""A model, the only stage of this rank, or all of its stages."""


class LocalStages:
    """All stages of a model on this rank.

    Args:
        model: The only stage, or all of them.

    Attributes:
        mesh: The mesh of the model.
        positions: The maximum number of tokens in a sequence.
        vocabulary: The number of tokens in the vocabulary, without padding.
        last: Whether this rank has the last stage, which returns logits.
        reads_source: Whether the model has an encoder.
        has_position_axes: Whether positions have a time, a height and a width.
        device: The device of the parameters.
        dtype: The dtype of the parameters.

    Raises:
        InferError: A module is not a decoding model, or a stage of this rank is missing.
    """

    def __init__(self, model: AnyModel) -> None:
        stages = [model] if isinstance(model, nn.Module) else list(model)
        if not stages:
            raise InferError("got no stage of a model")
        self._stages: list[DecodingModel] = []
        for stage in stages:
            if not isinstance(stage, DecodingModel):
                raise InferError(
                    f"{type(stage).__name__} is not a DecodingModel of megatron_models and cannot "
                    "generate text"
                )
            self._stages.append(stage)
        self._stages.sort(key=lambda stage: stage.stage)
        first_stage = self._stages[0]
        self.mesh = first_stage.mesh
        layout, self._pp = self.mesh.layout, self.mesh.axis("pp")
        expected = layout.stages(self._pp.index)
        if tuple(stage.stage for stage in self._stages) != tuple(sorted(expected)):
            numbers = ", ".join(str(stage.stage) for stage in self._stages)
            raise InferError(
                f"got stages {numbers} of the model, but with pp={layout.pp}, vpp={layout.vpp} "
                f"this rank has stages {', '.join(map(str, expected))}; give all of them"
            )
        self._replicas = self.mesh.axis("tp_cp" if layout.cp > 1 else "tp")
        self._end = layout.pipeline_rank_of(layout.pp * layout.vpp - 1)
        self.last = self._stages[-1].last
        self.reads_source = first_stage.reads_source
        self.has_position_axes = first_stage.config.has_position_axes
        embedding = first_stage.config.embedding
        self.positions, self.vocabulary = embedding.max_position_embeddings, embedding.vocab_size
        parameter = next(first_stage.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype

    def run(self, decoding_pass: DecodingPass) -> Float[Tensor, "s b v_part"] | None:
        """Runs the stages of this rank in one pass; returns logits if it has the last stage."""
        holder = self.mesh.layout.pipeline_rank_of
        first = self._stages[0].first_active_stage(decoding_pass)
        outputs: tuple[Tensor, ...] = ()
        for stage in self._stages:
            if stage.stage < first:
                continue
            if stage.stage > first and (before := holder(stage.stage - 1)) != self._pp.index:
                outputs = tuple(
                    receive(self._empty(shape), self._pp, before, purpose="activations")
                    for shape in stage.input_shapes(decoding_pass)
                )
            outputs = stage.decode(outputs, decoding_pass)
            if not stage.last and (after := holder(stage.stage + 1)) != self._pp.index:
                for output in outputs:
                    send(output, self._pp, after, purpose="activations")
        return outputs[0] if self.last else None

    def broadcast_from_last(self, t: Shaped[Tensor, "..."], *, purpose: str) -> None:
        """Overwrites a tensor on every rank of the model with that of the last stage."""
        if self.last:
            broadcast(t, self._replicas, purpose=purpose)
        broadcast(t, self._pp, self._end, purpose=purpose)

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)


@contextmanager
def evaluating(model: AnyModel) -> Iterator[None]:
    """Puts a model in eval mode, and restores the mode of every module afterwards."""
    stages = [model] if isinstance(model, nn.Module) else model
    training = [module for stage in stages for module in stage.modules() if module.training]
    for stage in stages:
        stage.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
