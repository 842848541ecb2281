"""What tasks on corpora of sentences share: their tokenizer, their order and their checks.

Importing this module does not import numpy or torch.
"""

from megatron_train.config.from_checkpoint import TOKENIZER_SETTINGS
from megatron_train.config.run import RunConfig
from megatron_train.config.values import Values
from megatron_train.errors import TrainError

ORDER = "compat"
"""The only order of these samples, which Megatron draws for a whole run at once."""

SETTINGS_READ = ("data.sample_order", "data.data_cache_path")
"""Optional settings that these tasks read."""


def with_sentence_defaults(values: Values, task: str) -> Values:
    """Returns ``values`` with the tokenizer of Megatron-LM's scripts and the order of samples.

    The tokenizer is BertWordPieceLowerCase if ``--vocab-file`` is the only setting that selects
    one, as in Megatron-LM's pretrain_bert.py and pretrain_t5.py.

    Args:
        values: The given values.
        task: Name of the task.
    """
    values = values.with_derived("data.sample_order", ORDER, f"the task {task}")
    selected = [name for name in TOKENIZER_SETTINGS if values.get(f"data.{name}") is not None]
    if selected != ["vocab_file"] or values.get("data.merge_file") is not None:
        return values
    return values.with_derived("data.tokenizer_type", "BertWordPieceLowerCase", f"the task {task}")


def check_sentences(run: RunConfig) -> None:
    """Refuses runs without a corpus of sentences, without a tokenizer or with another order.

    Raises:
        TrainError: A setting does not fit; the message names its flag.
    """
    if run.data.mock_data:
        raise TrainError(
            f"the task {run.task} does not work with --mock-data, which has no sentences; give "
            "--data-path"
        )
    if run.data.tokenizer is None:
        raise TrainError(
            f"the task {run.task} needs the word pieces of a tokenizer; give --vocab-file or "
            "--tokenizer-model"
        )
    if run.data.sample_order != ORDER:
        raise TrainError(
            f"--sample-order {run.data.sample_order} does not work with the task {run.task}, whose "
            f"samples have Megatron's order; give {ORDER} or leave it out"
        )
