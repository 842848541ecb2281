"""Settings of the optimizer and its schedules, with the names of Megatron-LM."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from megatron_optim.errors import OptimError
from megatron_optim.fields import flag
from megatron_optim.name_rules import NameRules
from megatron_optim.rule_registry import RULES
from megatron_optim.schedule import (
    ANNEAL_STYLES,
    DECAY_STYLES,
    INCREASE_STYLES,
    AnnealStyle,
    DecayStyle,
    IncreaseStyle,
    LearningRateSchedule,
    WeightDecaySchedule,
)


@dataclass(frozen=True)
class OptimizerConfig:
    """The update rule, gradient clipping, and the shape of the schedules.

    The length of the schedules is a property of the run. `learning_rate_schedule` and
    `weight_decay_schedule` take it in samples.
    """

    optimizer: str = field(
        default="adam",
        metadata=flag(
            "--optimizer",
            "update rule: adam (AdamW), muon, lion, adafactor, sgd, or one of another "
            "distribution; dist_muon is muon with --use-distributed-optimizer",
        ),
    )
    lr: float = field(
        default=1e-3,
        metadata=flag("--lr", "highest learning rate, reached at the end of the warm-up"),
    )
    min_lr: float = field(
        default=0.0,
        metadata=flag("--min-lr", "learning rate at the end of the decay and afterwards"),
    )
    decoupled_lr: float | None = field(
        default=None,
        metadata=flag(
            "--decoupled-lr",
            "highest learning rate of the token embedding and the output matrix; unset: lr",
        ),
    )
    decoupled_min_lr: float | None = field(
        default=None,
        metadata=flag(
            "--decoupled-min-lr",
            "learning rate of the token embedding and the output matrix at the end of the decay; "
            "unset: min_lr",
        ),
    )
    lr_warmup_init: float = field(
        default=0.0,
        metadata=flag("--lr-warmup-init", "learning rate at the start of the warm-up"),
    )
    lr_decay_style: DecayStyle = field(
        default="linear",
        metadata=flag(
            "--lr-decay-style", "shape of the decay after the warm-up", choices=DECAY_STYLES
        ),
    )
    lr_wsd_decay_style: AnnealStyle = field(
        default="exponential",
        metadata=flag(
            "--lr-wsd-decay-style", "shape of the decay phase of style WSD", choices=ANNEAL_STYLES
        ),
    )
    lr_decay_power: float = field(
        default=1.0,
        metadata=flag(
            "--lr-decay-power", "exponent of the style polynomial; 1 is linear (our name)"
        ),
    )
    weight_decay: float = field(
        default=0.01,
        metadata=flag("--weight-decay", "decoupled weight decay of matrices and embeddings"),
    )
    start_weight_decay: float | None = field(
        default=None,
        metadata=flag("--start-weight-decay", "initial weight decay; unset: weight_decay"),
    )
    end_weight_decay: float | None = field(
        default=None,
        metadata=flag("--end-weight-decay", "final weight decay; unset: weight_decay"),
    )
    weight_decay_incr_style: IncreaseStyle = field(
        default="constant",
        metadata=flag(
            "--weight-decay-incr-style",
            "shape of the schedule from the initial to the final weight decay",
            choices=INCREASE_STYLES,
        ),
    )
    adam_beta1: float = field(
        default=0.9,
        metadata=flag(
            "--adam-beta1", "decay rate of the running mean of the gradient", read_by="update rule"
        ),
    )
    adam_beta2: float = field(
        default=0.999,
        metadata=flag(
            "--adam-beta2",
            "decay rate of the running mean of the squared gradient",
            read_by="update rule",
        ),
    )
    adam_eps: float = field(
        default=1e-8,
        metadata=flag(
            "--adam-eps", "term added to the denominator of the update", read_by="update rule"
        ),
    )
    sgd_momentum: float = field(
        default=0.9,
        metadata=flag("--sgd-momentum", "momentum of SGD", read_by="update rule"),
    )
    lr_mult: tuple[str, ...] | None = field(
        default=None,
        metadata=flag(
            "--lr-mult",
            "factors of the learning rate by pattern of parameter names, such as "
            "'embedding.*=0.1' '*.bias=2'; the last pattern that matches applies (our name)",
        ),
    )
    weight_decay_mult: tuple[str, ...] | None = field(
        default=None,
        metadata=flag(
            "--weight-decay-mult",
            "factors of the weight decay by pattern of parameter names, such as 'output.*=0'; they "
            "replace 1 for matrices and 0 for biases and norms (our name)",
        ),
    )
    apply_wd_to_qk_layernorm: bool = field(
        default=False,
        metadata=flag(
            "--apply-wd-to-qk-layernorm", "apply weight decay to the norms of queries and keys"
        ),
    )
    embedding_weight_decay: bool = field(
        default=True,
        metadata=flag(
            "--no-embedding-weight-decay",
            "apply no weight decay to token and position embeddings (our name)",
        ),
    )
    clip_grad: float = field(
        default=1.0,
        metadata=flag("--clip-grad", "largest global gradient norm; 0 disables clipping"),
    )

    settings: Any = field(
        default=None,
        metadata={"flag": None, "help": "settings that only the update rule has (UpdateRuleKind)"},
    )

    def __post_init__(self) -> None:
        if self.optimizer not in RULES:
            unknown = RULES.unknown_name_message(self.optimizer, "{optimizer:repr}")
            raise OptimError(f"{{optimizer:name}}: {unknown}", vars(self))
        rates = ("lr", "min_lr", "decoupled_lr", "decoupled_min_lr", "lr_warmup_init")
        for name in (*rates, "weight_decay", "clip_grad"):
            if getattr(self, name) is not None and not getattr(self, name) >= 0.0:
                raise OptimError(
                    f"{{{name}:name}} must not be negative, got {{{name}:repr}}", vars(self)
                )
        if self.decoupled_min_lr is not None and self.decoupled_lr is None:
            raise OptimError(
                "{decoupled_min_lr:name} needs {decoupled_lr:name}; set both or neither",
                vars(self),
            )
        for name in ("adam_beta1", "adam_beta2", "sgd_momentum"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise OptimError(
                    f"{{{name}:name}} must lie in [0, 1), got {{{name}:repr}}", vars(self)
                )
        if not 0.0 < self.lr_decay_power < math.inf:
            raise OptimError(
                "{lr_decay_power:name} must be positive, got {lr_decay_power:repr}", vars(self)
            )
        if self.lr_decay_power != 1.0 and self.lr_decay_style != "polynomial":
            raise OptimError(
                "{lr_decay_power} has no effect with {lr_decay_style}; set {lr_decay_style:name} "
                "to polynomial or leave it out",
                vars(self),
            )
        if not self.adam_eps > 0.0:
            raise OptimError("{adam_eps:name} must be positive, got {adam_eps:repr}", vars(self))
        _ = self.name_rules

    @property
    def name_rules(self) -> NameRules:
        """The factors of learning rate and weight decay by name.

        Raises:
            OptimError: ``lr_mult`` or ``weight_decay_mult`` is not ``PATTERN=FACTOR``.
        """
        return NameRules.of(vars(self))

    def check_names(self, names: Iterable[str]) -> None:
        """Refuses patterns that match none of the parameters of a model.

        Args:
            names: The global names of all parameters, on all ranks.

        Raises:
            OptimError: A pattern matches none; the message names it.
        """
        known = list(names)
        self.name_rules.refuse_unmatched(vars(self), self.name_rules.matches(known), known)

    def learning_rate_schedule(
        self,
        *,
        decay_samples: int,
        warmup_samples: int = 0,
        wsd_decay_samples: int | None = None,
        decoupled: bool = False,
    ) -> LearningRateSchedule:
        """Returns the learning-rate schedule of a run whose decay ends at ``decay_samples``.

        If ``decoupled``, returns the schedule of the token embedding and the output matrix. It
        differs in its highest and lowest rate if ``decoupled_lr`` and ``decoupled_min_lr`` are set.
        """
        highest, lowest = self.lr, self.min_lr
        if decoupled and self.decoupled_lr is not None:
            highest = self.decoupled_lr
            lowest = lowest if self.decoupled_min_lr is None else self.decoupled_min_lr
        return LearningRateSchedule(
            max_lr=highest,
            min_lr=lowest,
            init_lr=self.lr_warmup_init,
            warmup_samples=warmup_samples,
            decay_samples=decay_samples,
            decay_style=self.lr_decay_style,
            wsd_decay_samples=wsd_decay_samples,
            wsd_decay_style=self.lr_wsd_decay_style,
            decay_power=self.lr_decay_power,
        )

    def weight_decay_schedule(self, *, samples: int) -> WeightDecaySchedule:
        """Returns the weight-decay schedule of a run; it changes during the first ``samples``."""
        start, end = self.start_weight_decay, self.end_weight_decay
        return WeightDecaySchedule(
            start=self.weight_decay if start is None else start,
            end=self.weight_decay if end is None else end,
            samples=samples,
            style=self.weight_decay_incr_style,
        )
