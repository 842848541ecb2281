"""What left-to-right language modelling refuses, told in flags."""

from megatron_data.datasets import FIMConfig

from megatron_train.config.options import options_of
from megatron_train.config.run import RunConfig
from megatron_train.errors import TrainError


def check_fim(run: RunConfig) -> None:
    """Refuses options of filling in the middle where nothing is, or without a tokenizer.

    Raises:
        TrainError: in one line, with the flags.
    """
    fim = run.section(FIMConfig)
    if run.data.fim_data and run.data.tokenizer is None:
        raise TrainError(
            "--fim-data needs a tokenizer, which makes tokens of the parts of a text; give "
            "--tokenizer-model"
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
            "--fim-fragment-rate is about what --fim-split-sample tells apart; give both, or "
            "leave it out"
        )
