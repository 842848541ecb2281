"""Settings of sequence classification. Importing this module imports neither numpy nor torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any, Final

from megatron_train.config.fields import check_positive, setting
from megatron_train.config.from_checkpoint import CHECKPOINT_ORIGIN
from megatron_train.config.run import RunConfig
from megatron_train.config.values import GivenValue, Values
from megatron_train.errors import TrainError

if TYPE_CHECKING:
    from megatron_data.datasets import LabelledText, TextColumns

SECTION: Final = "classification"
"""Key of the section in configuration files."""

HEAD: Final = "classification"
"""The value of --task-head that the task trains."""

Rows = list["LabelledText"]


@dataclass(frozen=True)
class ClassificationSettings:
    """The section ``classification``: columns of tables, classes and length in epochs.

    Raises:
        TrainError: A value is invalid; the message names its flag.
    """

    text_columns: tuple[str, ...] = setting(
        ("text",),
        "one or two columns of texts: names in the header line of a TSV or CSV file, keys of JSON "
        "lines, or numbers from 0 for files without a header line (our name)",
    )
    label_column: str = setting("label", "column of labels, named like --text-columns (our name)")
    class_names: tuple[str, ...] | None = setting(
        None,
        "all labels, in the order of their classes; unset: those of the training texts, in "
        "alphabetical or numerical order (our name)",
    )
    epochs: int | None = setting(
        None, "length of the run in passes over the training texts, instead of --train-iters"
    )

    def __post_init__(self) -> None:
        check_positive(self, "epochs")
        names = self.class_names
        if names is not None and (len(names) < 2 or len({*names}) < len(names)):
            raise TrainError(
                f"--class-names {' '.join(names)}: give at least two names, each of them once"
            )

    def columns(self) -> "TextColumns":
        """Returns the columns as megatron-data takes them.

        Raises:
            DataError: A column is used twice, or names and numbers are mixed.
        """
        from megatron_data.datasets import TextColumns

        return TextColumns(self.text_columns, self.label_column)


def read_splits(
    data_path: Any,
    per_split: Sequence[Any],
    split: str,
    settings: ClassificationSettings,
) -> tuple[Rows | None, Rows | None, Rows | None]:
    """Reads the rows for training, validation and testing; None for a split that is not given.

    Args:
        data_path: Tables that ``split`` divides, or None.
        per_split: Tables of each split, or None for each; used without ``data_path``.
        split: Weights of the splits.
        settings: Columns.

    Raises:
        DataError: A table is missing or damaged.
    """
    from megatron_data.datasets import split_rows

    if data_path:
        first, second, third = split_rows(_read(data_path, settings), split)
        return first, second, third
    train, valid, test = (_read(paths, settings) if paths else None for paths in per_split)
    return train, valid, test


def _read(paths: Sequence[str], settings: ClassificationSettings) -> Rows:
    from megatron_data.datasets import read_labelled_texts

    columns = settings.columns()
    return [row for path in paths for row in read_labelled_texts(path, columns)]


def with_classification_defaults(values: Values) -> Values:
    """Returns ``values`` with the head, its classes and the lengths that follow from the texts.

    Tables are read only if classes, ``--epochs`` or the length of an evaluation need them.
    """
    origin = "the task classification"
    values = _instead_of_pretraining(values, "model.task_head", HEAD, origin)
    given = ClassificationSettings(**values.section(SECTION))
    names = given.class_names
    lengths = {"training.train_iters", "training.train_samples"} & values.given.keys()
    epochs = None if lengths else given.epochs
    if names is None or epochs is not None or "evaluation.eval_iters" not in values.given:
        data = values.section("data")
        paths = [data.get(f"{name}_data_path") for name in ("train", "valid", "test")]
        split = data.get("split", _default_split())
        train, valid, _ = read_splits(data.get("data_path"), paths, split, given)
        if names is None and train:
            from megatron_data.datasets import label_names

            names = label_names(train)
            values = values.with_derived(f"{SECTION}.class_names", names, "the training texts")
        if epochs is not None and train:
            samples = epochs * len(train)
            values = values.with_derived("training.train_samples", samples, "--epochs")
        batch = values.get("training.global_batch_size") or values.get("training.micro_batch_size")
        if valid and batch:
            whole = ceil(len(valid) / batch)
            values = values.with_derived("evaluation.eval_iters", whole, "all validation texts")
    if names is not None:
        values = _instead_of_pretraining(values, "model.num_labels", len(names), origin)
    return values


def _default_split() -> str:
    from megatron_train.config.data import DataConfig

    return DataConfig.split


def _instead_of_pretraining(values: Values, key: str, value: Any, origin: str) -> Values:
    """Returns ``values`` with ``value`` instead of the checkpoint's, unless the user gave one."""
    held = values.given.get(key)
    if held is not None and not held.origin.startswith(CHECKPOINT_ORIGIN):
        return values
    return Values({**values.given, key: GivenValue(value, origin)})


def check_classification(run: RunConfig) -> None:
    """Refuses another head, another number of classes, and runs without texts.

    Raises:
        TrainError: The settings do not fit; the message names the flags.
    """
    settings, model = run.section(ClassificationSettings), run.model
    if model.task_head != HEAD:  # type: ignore[attr-defined]
        raise TrainError(
            f"--task-head {model.task_head} does not fit the task classification; "  # type: ignore[attr-defined]
            f"leave it out, or give {HEAD}"
        )
    if run.data.mock_data:
        raise TrainError(
            "the task classification does not work with --mock-data, which has no labels; give "
            "--data-path"
        )
    if run.data.tokenizer is None:
        raise TrainError(
            "the task classification needs a tokenizer for its texts; give --tokenizer-model or "
            "--vocab-file"
        )
    names = settings.class_names
    if names is None:
        raise TrainError("the classes are unknown; give --class-names, or texts to train on")
    if len(names) != model.num_labels:  # type: ignore[attr-defined]
        raise TrainError(
            f"--num-labels {model.num_labels} does not fit the {len(names)} classes "  # type: ignore[attr-defined]
            f"{', '.join(names[:10])}; use {len(names)}, or leave it out"
        )
    if settings.epochs is not None and run.training.train_iters is not None:
        raise TrainError("--epochs and --train-iters exclude each other; give one")
