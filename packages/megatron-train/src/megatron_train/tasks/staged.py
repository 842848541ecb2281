"""What tasks share that train the stages of one model: its record, its units and its dropout."""

from collections.abc import Sequence
from typing import Any

from megatron_ckpt import ModelRecord
from megatron_models import Dropout, ModelConfig, config_of, record_of
from megatron_parallel import DropoutKey, Mesh, TensorSpec
from torch import nn

from megatron_train.tasks.task import MicroBatch


class StagedTask:
    """Base of tasks that train the stages of one model.

    Args:
        stages: This rank's stages of the model, such as `megatron_models.GPT`; one without pipeline
            parallelism. Between stages, activations are one tensor ``[s, b, h]``.
        family: Name of the model's family, recorded in checkpoints.
        seed: Seed of the dropout masks, which depend on the seed, the step and the sample number.
        hidden_dropout: Probability of dropping an element of a residual branch.
        attention_dropout: Probability of dropping an attention probability.
    """

    def __init__(
        self,
        stages: Sequence[Any],
        family: str | None,
        *,
        seed: int = 1234,
        hidden_dropout: float = 0.0,
        attention_dropout: float = 0.0,
    ) -> None:
        self._stages = tuple(stages)
        self._family = family
        self._seed = seed
        self._hidden_dropout = hidden_dropout
        self._attention_dropout = attention_dropout
        self._mesh: Mesh = self._stages[0].mesh

    @property
    def stages(self) -> Sequence[Any]:
        """This rank's stages of the model."""
        return self._stages

    @property
    def _model(self) -> ModelConfig:
        """The configuration of the model."""
        config: ModelConfig = self._stages[0].config
        return config

    @property
    def model_record(self) -> ModelRecord:
        """The model's kind, family and configuration."""
        return ModelRecord(family=self._family, **record_of(self._model))

    def migrated_config(self, record: ModelRecord) -> dict[str, Any]:
        """Returns the configuration in a checkpoint's record with the current fields."""
        return config_of(record).to_dict()

    def fsdp_units(self, stage: nn.Module) -> Sequence[nn.Module]:
        """Returns the blocks of a stage."""
        return [unit for own in self.stages if id(own) == id(stage) for unit in own.units()]

    def _stage(self, number: int) -> Any:
        """Returns this rank's stage of a number."""
        return next(one for one in self.stages if one.stage == number)

    def _drops(self, iteration: int | None) -> bool:
        """Returns whether the model draws random numbers in a step."""
        noisy = self._hidden_dropout or self._attention_dropout or self._model.uses_noise
        return iteration is not None and bool(noisy)

    def _dropout(self, batch: MicroBatch, iteration: int | None) -> dict[str, Dropout]:
        """Returns the keyword argument for dropout; empty if the model draws no numbers."""
        if iteration is None or not self._drops(iteration):
            return {}
        key = DropoutKey.for_batch(
            seed=self._seed,
            iteration=iteration,
            samples=batch.fields["sample_ids"],
            positions=batch.fields["tokens"].shape[1] * self._mesh.axis("cp").size,
        )
        return {"dropout": Dropout(key, self._hidden_dropout, self._attention_dropout)}

    def stage_output_spec(
        self, batch: MicroBatch, stage: int
    ) -> TensorSpec | tuple[TensorSpec, ...]:
        """Returns shape and dtype of the activations between two stages."""
        samples, length = batch.fields["tokens"].shape
        spec: TensorSpec = self._stages[0].stage_output_spec(
            samples, length * self._mesh.axis("cp").size
        )
        return spec
