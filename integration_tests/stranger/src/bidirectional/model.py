"""The encoder: the whole model or one stage of a pipeline."""

from collections.abc import Sequence

import megatron_parallel
import torch
from megatron_kernels import Mask
from megatron_models import ConfigError, Placement
from megatron_models.components.context import Context
from megatron_models.components.embedding.spec import output_spec
from megatron_models.components.norm.module import Norm
from megatron_models.components.norm.spec import NormSpec
from megatron_models.components.stack import run_layers
from megatron_models.components.trunk import Trunk
from megatron_models.stages import plan_stage
from megatron_parallel import Mesh, initialize_parameters
from torch import Tensor, nn
from torch.nn import functional

from bidirectional.config import BidirectionalConfig


class Encoder(Trunk):
    """Maps tokens to the output of the last layer ``[s, b, h]``; `pool` reads the first token."""

    def __init__(
        self,
        config: BidirectionalConfig,
        placement: Placement,
        *,
        chunk: int = 0,
        split: Sequence[range] | None = None,
        seed: int = 1234,
    ) -> None:
        mesh = placement.mesh
        if placement.sequence_parallel or mesh.layout.cp > 1:
            raise ConfigError(
                "this encoder does not support sequence or context parallelism; leave them out"
            )
        plan = plan_stage(config, mesh.layout, mesh.axis("pp").index, chunk, split)
        stage = config.trunk().stage(plan.layers, first=plan.first, last=plan.last)
        super().__init__(stage, placement)
        self.config, self.mesh, self.dtype = config, mesh, placement.dtype
        self.stage, self.first, self.last = plan.stage, plan.first, plan.last
        extra = config.extra_shardings()
        if plan.first:
            self.segments = nn.Module()
            placement.register_parameters(self.segments, {"weight": extra["segments.weight"]})
            self.embedding_norm = Norm(config.component(NormSpec), placement)
        if plan.last:
            self.pooler = nn.Module()
            names = ("weight", "bias")
            placement.register_parameters(
                self.pooler, {name: extra[f"pooler.{name}"] for name in names}
            )
            if config.masked_lm_head:
                self.output = placement.column_parallel_linear(output_spec(config))
        if placement.resolved_device.type != "meta":
            initialize_parameters(self, seed=seed, mesh=mesh)

    def stage_output_spec(
        self, batch_size: int, sequence_length: int
    ) -> megatron_parallel.TensorSpec:
        """Returns shape and dtype of a stage's output."""
        shape = (sequence_length, batch_size, self.config.hidden_size)
        return megatron_parallel.TensorSpec(shape, self.dtype)

    def forward(  # type: ignore[override]
        self, x: Tensor, *, segments: Tensor | None = None, padding: Tensor | None = None
    ) -> Tensor:
        """Runs this stage.

        The last stage returns this rank's logits ``[s, b, v_part]`` if there is an output layer.

        Args:
            x: Tokens ``[b, s]`` on the first stage, activations ``[s, b, h]`` on the others.
            segments: Segment id of each token ``[b, s]``. Defaults to 0 for all tokens.
            padding: True where a token ``[b, s]`` is padding, which no token attends to.
        """
        if self.first:
            ids = torch.zeros_like(x) if segments is None else segments
            x = self.embedding(x, None, 0) + functional.embedding(ids.t(), self.segments.weight)
            x = self.embedding_norm(x)
        documents = None if padding is None else -padding.to(torch.int32)
        mask = Mask(causal=False, document_ids=documents).prepare(len(x), len(x), device=x.device)
        x = run_layers(self.layers, x, Context(mask), self.tp)
        return self.output(x) if self.last and self.config.masked_lm_head else x

    def pool(self, stream: Tensor) -> Tensor:
        """Returns the pooled first token ``[b, h]`` of the last layer's output."""
        return torch.tanh(functional.linear(stream[0], self.pooler.weight, self.pooler.bias))


def stages(
    config: BidirectionalConfig,
    placement: Placement | Mesh,
    *,
    split: Sequence[range] | None = None,
    seed: int = 1234,
) -> list[Encoder]:
    """Builds this rank's stages, one for each of its ``vpp`` model chunks."""
    placement = Placement.resolve(placement)
    chunks = range(placement.mesh.layout.vpp)
    return [Encoder(config, placement, chunk=chunk, split=split, seed=seed) for chunk in chunks]
