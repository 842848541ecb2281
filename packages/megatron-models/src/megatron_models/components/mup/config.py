"""Maximal update parametrization (µP): one learning rate for all widths of a model.

The rules are those of Yang et al. 2022, "Tensor Programs V", table 8, as Megatron-LM has them. With
the ratio ``m = hidden_size / mup_base_hidden_size``:

- Logits are divided by ``m``, and attention scores by the width of a head, not by its square root.
  These are the fields ``logits_scaling`` and ``softmax_scale``, so that a model without µP computes
  the same.
- Initial weights of matrices between embedding and output are divided by ``sqrt(m)``.
- The optimizer gets the ratios of the sizes of each parameter (`MupConfig.width_ratios`) and
  derives its learning rate. With Adam it is divided by ``m`` for the same matrices.

Importing this module does not import torch.
"""

import math
from dataclasses import dataclass, field

from megatron_models.components.embedding.spec import OutputConfig
from megatron_models.components.fields import flag
from megatron_models.components.heterogeneous.config import HeterogeneousConfig
from megatron_models.components.latent_attention.config import LatentAttentionConfig
from megatron_models.components.mixer import Parameters
from megatron_models.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class MupConfig(HeterogeneousConfig, LatentAttentionConfig, OutputConfig):
    """Whether a model has maximal update parametrization, and the model it starts from.

    It sets ``softmax_scale`` and ``logits_scaling`` where they have their defaults.
    """

    use_mup: bool = field(
        default=False,
        metadata=flag(
            "--use-mup",
            "maximal update parametrization: a learning rate that is best for one width is best "
            "for all; scales initial weights, learning rates, logits and attention scores",
            no_effect=True,
        ),
    )
    mup_base_hidden_size: int = field(
        default=0,
        metadata=flag(
            "--mup-base-hidden-size",
            "hidden_size of the model that the learning rate was chosen for; 0: that of this model",
            positive=True,
            derived=True,
            no_effect=True,
            unit="channels",
        ),
    )
    mup_base_head_dim: float = field(
        default=0.0,
        metadata=flag(
            "--mup-base-head-dim",
            "kv_channels of the model that the learning rate was chosen for: attention scores have "
            "the factor sqrt(this) / kv_channels, which is 1 / sqrt(kv_channels) in that model; "
            "0: 1 / kv_channels",
            nonnegative=True,
            no_effect=True,
        ),
    )
    mup_attn_scale_power: float = field(
        default=1.0,
        metadata=flag(
            "--mup-attn-scale-power",
            "power of kv_channels that attention scores are divided by: 1 with maximal update "
            "parametrization, 0.5 without",
            nonnegative=True,
            maximum=2,
            no_effect=True,
        ),
    )

    def _fill(self) -> None:
        super()._fill()
        if not self.use_mup:
            return
        self._set("mup_base_hidden_size", self.hidden_size)
        self._set("softmax_scale", self._score_factor)
        if self.logits_scaling == 1.0:
            object.__setattr__(self, "logits_scaling", self.width_multiplier)

    @property
    def _score_factor(self) -> float:
        """Factor of attention scores, with that of YaRN in multi-latent attention."""
        magnitude = 1.0
        if self.multi_latent_attention:
            magnitude = self.latent_softmax_scale * math.sqrt(self.kv_channels)
        base = math.sqrt(self.mup_base_head_dim) if self.mup_base_head_dim else 1.0
        return magnitude * base / math.pow(self.kv_channels, self.mup_attn_scale_power)

    def _check(self) -> None:
        super()._check()
        if not self.use_mup:
            for name in ("mup_base_hidden_size", "mup_base_head_dim", "mup_attn_scale_power"):
                if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                    raise ConfigError(
                        f"{{{name}}} has no effect without {{use_mup:name}}; leave it out",
                        vars(self),
                    )
            return
        for number, block in enumerate(self.blocks):
            if block.attention.changes.get("kv_channels", self.kv_channels) != self.kv_channels:
                raise ConfigError(
                    "{use_mup:name} has one {softmax_scale:name} for all layers, but layer "
                    f"{number} has other kv_channels; leave out one of them",
                    vars(self),
                )

    @property
    def width_multiplier(self) -> float:
        """Width of the residual stream over that of the model of the learning rate."""
        return self.hidden_size / self.mup_base_hidden_size if self.use_mup else 1.0

    @property
    def hidden_init(self) -> dict[str, float]:
        """The field of layers that differs from that of embedding and output: initial weights."""
        ratio = self.width_multiplier
        return {} if ratio == 1.0 else {"init_method_std": self.init_method_std / math.sqrt(ratio)}

    def ratios_of(self, parameters: Parameters) -> dict[str, tuple[float, float]]:
        """Returns the ratios of inputs and outputs of each parameter; nothing if all are 1.

        An output matrix counts as its transpose, since the logits are divided by the ratio of its
        inputs.
        """
        ratio = self.width_multiplier
        if ratio == 1.0:
            return {}
        return {
            name: (ratio if spec.is_hidden_matrix else 1.0, ratio)
            for name, spec in parameters.items()
        }
