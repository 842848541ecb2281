"""The sections of a run's configuration that belong to the trainer itself.

The sections ``model``, ``optimizer`` and ``layout`` are the configuration of the model's kind,
`megatron_optim.OptimizerConfig` and `megatron_parallel.ParallelLayout`. Names and defaults are
Megatron-LM's, except where the help has "(our name)". Each section checks its own fields;
`megatron_train.config.run` checks combinations of several sections.
"""

from dataclasses import dataclass
from typing import Final, Literal

from megatron_train.config.fields import (
    check_not_negative,
    check_positive,
    flag_of,
    required,
    setting,
)
from megatron_train.errors import TrainError

GRAPH_WARMUP_STEPS: Final = 3
"""Default number of steps before CUDA graphs are captured, as in Megatron-LM."""


@dataclass(frozen=True)
class TrainingConfig:
    """Settings of the length of the run, batch sizes, precision and device."""

    micro_batch_size: int = required(
        "samples in a micro-batch, the input of one forward pass", unit="samples"
    )
    task: str | None = setting(
        None,
        "task that the model is trained for (megatron-train tasks list); unset: the default task "
        "of its kind (our name)",
    )
    train_iters: int | None = setting(
        None, "steps of the whole run; required, unless --train-samples is given", unit="steps"
    )
    train_samples: int | None = setting(
        None,
        "samples of the whole run, instead of --train-iters; an incomplete last batch is dropped",
        unit="samples",
    )
    global_batch_size: int | None = setting(
        None,
        "samples in one step; unset: one micro-batch on each data parallel rank",
        unit="samples",
    )
    rampup_batch_size: tuple[int, ...] | None = setting(
        None,
        "ramp-up of the batch size to --global-batch-size: first size, increment and number of "
        "samples; needs --train-samples",
        unit="samples",
    )
    step_batch_size_schedule: tuple[str, ...] | None = setting(
        None,
        "batch sizes by consumed tokens, instead of --global-batch-size, such as "
        '"0:768 250B:1536": 768 samples a step, and 1536 after 250 billion tokens; K, M, B and T '
        "multiply by powers of 1,000",
    )
    decrease_batch_size_if_needed: bool = setting(
        False,
        "round a batch size down to a whole number of micro-batches on each data parallel rank, "
        "instead of refusing it; not with --step-batch-size-schedule",
    )
    seed: int = setting(1234, "seed of initial weights and data order")
    bf16: bool = setting(False, "store weights and compute in bfloat16, with fp32 main parameters")
    fp16: bool = setting(
        False,
        "store weights and compute in float16, with fp32 main parameters and a loss scale",
    )
    float64: bool = setting(
        False, "store weights and compute in float64, for exact comparisons (our name)"
    )
    calculate_per_token_loss: bool = setting(
        True,
        "give each unmasked token of a step the same weight; otherwise each micro-batch of each "
        "data parallel rank has the same weight, as is Megatron-LM's default",
        flag="--calculate-per-token-loss",
    )
    compile: bool = setting(
        False, "compile forward, loss and backward with torch.compile (our name)"
    )
    compile_scope: Literal["stage", "layer"] = setting(
        "stage",
        "what --compile compiles at a time: a stage, or a layer, whose code equal layers share, so "
        "that deep models start fast (our name)",
    )
    cuda_graph_impl: Literal["none", "local"] = setting(
        "none",
        "capture the passes of each compiled layer as CUDA graphs (local), and replay them for "
        "each micro-batch; never run on a GPU yet",
    )
    cuda_graph_warmup_steps: int = setting(
        GRAPH_WARMUP_STEPS, "steps before CUDA graphs are captured", unit="steps"
    )
    deterministic_mode: bool = setting(
        False, "use only deterministic algorithms; fail on operations that have none"
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "device to train on; auto selects a GPU if there is one (our name)"
    )
    max_seqlen_per_dp_cp_rank: int | None = setting(
        None,
        "maximum number of tokens on a rank at a time, with --hybrid-context-parallel; longer "
        "documents are split over several ranks",
        unit="tokens",
    )
    hidden_dropout: float = setting(
        0.1, "dropout probability after embedding, attention and feed-forward layer"
    )
    attention_dropout: float = setting(0.1, "dropout probability of attention probabilities")
    distributed_timeout_minutes: float = setting(
        10.0,
        "time-out of ranks that wait for another rank",
        unit="minutes",
    )
    iterations_to_skip: tuple[int, ...] | None = setting(
        None,
        "numbers of steps, from 1, that only read their samples: no update, log line, evaluation "
        "or checkpoint",
        unit="steps",
    )
    exit_interval: int | None = setting(
        None,
        "save a checkpoint and stop at the next step that is a multiple of this number",
        unit="steps",
    )
    exit_duration_in_mins: float | None = setting(
        None, "save a checkpoint and stop after this time", unit="minutes"
    )

    def __post_init__(self) -> None:
        check_positive(
            self, "micro_batch_size", "global_batch_size", "train_iters", "train_samples"
        )
        if self.train_iters is None and self.train_samples is None:
            raise TrainError(
                "the length of the run is unknown: give --train-iters or --train-samples"
            )
        if self.train_iters is not None and self.train_samples is not None:
            raise TrainError("--train-iters and --train-samples exclude each other; give one")
        if self.rampup_batch_size is not None:
            if self.global_batch_size is None:
                raise TrainError("--rampup-batch-size needs --global-batch-size, its final size")
            if self.train_samples is None:
                raise TrainError(
                    "--rampup-batch-size needs the length of the run in samples, since steps have "
                    "several sizes; give --train-samples instead of --train-iters"
                )
        if self.step_batch_size_schedule is not None:
            for name in ("rampup_batch_size", "decrease_batch_size_if_needed"):
                if getattr(self, name):
                    raise TrainError(
                        f"--step-batch-size-schedule and {flag_of(name)} exclude each other; give "
                        "one"
                    )
        for number in self.iterations_to_skip or ():
            if number < 1:
                raise TrainError(f"--iterations-to-skip: steps count from 1, got {number}")
        check_positive(self, "max_seqlen_per_dp_cp_rank")
        check_positive(
            self, "exit_interval", "exit_duration_in_mins", "distributed_timeout_minutes"
        )
        check_not_negative(self, "seed")
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                flag = "--" + name.replace("_", "-")
                raise TrainError(f"{flag} must be in [0, 1), got {getattr(self, name)}")
        given = [flag_of(name) for name in ("bf16", "fp16", "float64") if getattr(self, name)]
        if len(given) > 1:
            raise TrainError(f"{' and '.join(given)} exclude each other; give one")

    @property
    def precision(self) -> Literal["float32", "bfloat16", "float16", "float64"]:
        """The name of the dtype of weights and arithmetic in torch."""
        if self.bf16:
            return "bfloat16"
        if self.fp16:
            return "float16"
        return "float64" if self.float64 else "float32"


@dataclass(frozen=True)
class ScheduleConfig:
    """Lengths of the learning-rate schedule. Its shape is in the section ``optimizer``.

    Lengths are given in samples if the length of the run is (--train-samples).
    """

    lr_decay_iters: int | None = setting(
        None, "step at which the decay ends; unset: --train-iters", unit="steps"
    )
    lr_decay_samples: int | None = setting(
        None,
        "samples at which the decay ends; unset: --train-samples",
        unit="samples",
    )
    lr_warmup_iters: int = setting(0, "steps of linear warm-up", unit="steps")
    lr_warmup_samples: int = setting(0, "samples of linear warm-up", unit="samples")
    lr_warmup_fraction: float | None = setting(
        None, "warm-up as a fraction of the decay, instead of --lr-warmup-iters or -samples"
    )
    lr_wsd_decay_iters: int | None = setting(
        None, "steps of the last phase of the WSD style", unit="steps"
    )
    lr_wsd_decay_samples: int | None = setting(
        None, "samples of the last phase of the WSD style", unit="samples"
    )

    def __post_init__(self) -> None:
        check_positive(self, "lr_decay_iters", "lr_wsd_decay_iters")
        check_positive(self, "lr_decay_samples", "lr_wsd_decay_samples")
        check_not_negative(self, "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction")
        for name in ("lr_warmup_iters", "lr_warmup_samples"):
            if self.lr_warmup_fraction is not None and getattr(self, name):
                raise TrainError(
                    f"--lr-warmup-fraction and {flag_of(name)} exclude each other; give one"
                )
        if self.lr_warmup_fraction is not None and self.lr_warmup_fraction >= 1:
            raise TrainError(f"--lr-warmup-fraction must be below 1, got {self.lr_warmup_fraction}")

    def refuse_other_unit(self, unit: str, other: str) -> None:
        """Refuses lengths in another unit than that of the run.

        Args:
            unit: Unit of the length of the run, ``iters`` or ``samples``.
            other: The other of the two units.
        """
        for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
            if getattr(self, f"{name}_{other}"):
                wrong, right = flag_of(f"{name}_{other}"), flag_of(f"{name}_{unit}")
                raise TrainError(f"--train-{unit} and {wrong} exclude each other; give {right}")

    def check_lengths(self, unit: str, run: int, style: str) -> None:
        """Refuses phases of the schedule that are longer than its decay.

        Args:
            unit: Unit of the lengths, ``iters`` or ``samples``.
            run: Length of the run.
            style: Style of the decay.
        """
        decay, end = getattr(self, f"lr_decay_{unit}"), f"--lr-decay-{unit}"
        if decay is None:
            decay, end = run, f"--train-{unit}"
        warmup, beginning = getattr(self, f"lr_warmup_{unit}"), f"--lr-warmup-{unit}"
        if warmup >= decay:
            raise TrainError(
                f"{beginning} {warmup} must be below {end} {decay}, the end of the decay of the "
                "learning rate; shorten the warm-up or lengthen the decay"
            )
        if self.lr_warmup_fraction is not None:
            warmup, beginning = self.lr_warmup_fraction * decay, "--lr-warmup-fraction"
        annealing, flag = getattr(self, f"lr_wsd_decay_{unit}"), f"--lr-wsd-decay-{unit}"
        if style == "WSD" and annealing is None:
            raise TrainError(
                f"--lr-decay-style WSD needs {flag}, the length of its final phase in "
                f"{'steps' if unit == 'iters' else unit}"
            )
        if style == "WSD" and annealing > decay - warmup:
            raise TrainError(
                f"{flag} {annealing} does not fit between the end of the warm-up at {warmup:g} "
                f"({beginning}) and the end of the decay at {decay} ({end}); shorten one of them"
            )


@dataclass(frozen=True)
class EvaluationConfig:
    """Settings of validation. All evaluations use the same samples."""

    eval_interval: int = setting(1000, "steps between evaluations", unit="steps")
    eval_iters: int = setting(
        100, "global batches in one evaluation; 0 turns evaluation off", unit="batches"
    )

    def __post_init__(self) -> None:
        check_positive(self, "eval_interval")
        check_not_negative(self, "eval_iters")


@dataclass(frozen=True)
class LoggingConfig:
    """Settings of the output and the records of a run."""

    log_interval: int = setting(100, "steps between log lines", unit="steps")
    log_throughput: bool = setting(False, "add throughput per GPU (TFLOP/s/GPU) to the log line")
    log_num_zeros_in_grad: bool = setting(False, "add the zeros in the gradient to the log line")
    log_params_norm: bool = setting(False, "add the norm of the trained parameters to the log line")
    log_layer_norms: bool = setting(
        False,
        "record norms of gradient and parameters of each layer at every log line, in metrics.jsonl "
        "(our name)",
    )
    log_update_ratios: bool = setting(
        False,
        "record the norm of the update of each layer over that of its parameters at every log "
        "line, in metrics.jsonl (our name)",
    )
    log_layer_outputs: bool = setting(
        False,
        "record root mean square, largest magnitude, zeros and non-finite share of the output of "
        "each layer at every log line, in metrics.jsonl (our name)",
    )
    log_max_attention_logit: bool = setting(
        False, "record the largest attention score of all layers at every log line"
    )
    moe_per_layer_logging: bool = setting(
        False,
        "report load, router entropy and dropped share of each layer with experts: the worst layer "
        "on the log line, all layers in metrics.jsonl and TensorBoard",
    )
    tensorboard_dir: str | None = setting(None, "folder for TensorBoard event files", unit="path")
    progress: bool = setting(True, "show a progress bar if standard error is a terminal (our name)")

    def __post_init__(self) -> None:
        check_positive(self, "log_interval")

    @property
    def observes(self) -> bool:
        """Whether layers report scores or outputs for log lines."""
        return self.log_layer_outputs or self.log_max_attention_logit

    @property
    def measures(self) -> bool:
        """Whether gradients or parameters are measured for log lines."""
        norms = self.log_params_norm or self.log_layer_norms
        return self.log_num_zeros_in_grad or norms or self.log_update_ratios
