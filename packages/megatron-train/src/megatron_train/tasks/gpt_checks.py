"""Checks of the settings of causal language modelling; errors name flags."""

from megatron_data.datasets import FIMConfig

from megatron_train.config.options import options_of
from megatron_train.config.run import RunConfig
from megatron_train.errors import TrainError


def check_logits(run: RunConfig) -> None:
    """Refuses a model without logits of tokens.

    Raises:
        TrainError: The model has a task head.
    """
    if not run.model.predicts_tokens:
        raise TrainError(
            "the task gpt predicts tokens, but a model with --task-head has no logits of them; "
            "leave it out, or use finetune classification"
        )


def check_fim(run: RunConfig) -> None:
    """Refuses options of fill-in-the-middle without ``--fim-data`` or without a tokenizer.

    Raises:
        TrainError: The settings contradict each other; the message names the flags.
    """
    fim = run.section(FIMConfig)
    if run.data.fim_data and run.data.tokenizer is None:
        raise TrainError(
            "--fim-data needs a tokenizer for the parts of a text; give --tokenizer-model"
        )
    given = [
        option.flag
        for option in options_of(FIMConfig, "fim")
        if getattr(fim, option.name) != option.default
    ]
    if given and not run.data.fim_data:
        raise TrainError(f"{given[0]} needs --fim-data; give both, or leave it out")
    if fim.fragment_rate != FIMConfig.fragment_rate and not fim.split_sample:
        raise TrainError(
            "--fim-fragment-rate has no effect without --fim-split-sample; give both, or leave it "
            "out"
        )
