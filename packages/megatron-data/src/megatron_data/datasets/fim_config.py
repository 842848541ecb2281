"""The settings of fill-in-the-middle. Importing this module does not import numpy."""

from dataclasses import dataclass, field, fields

from megatron_data.errors import DataError


@dataclass(frozen=True)
class FIMConfig:
    """Configuration of fill-in-the-middle.

    Raises:
        DataError: A rate is not between 0 and 1.
    """

    rate: float = field(
        default=0.5,
        metadata={"help": "fraction of documents that are rearranged", "flag": "--fim-rate"},
    )
    spm_rate: float = field(
        default=0.5,
        metadata={
            "help": "fraction of the rearranged documents with the suffix first",
            "flag": "--fim-spm-rate",
        },
    )
    split_sample: str | None = field(
        default=None,
        metadata={
            "help": "token between fragments, such as files, that are rearranged one by one",
            "flag": "--fim-split-sample",
        },
    )
    fragment_rate: float = field(
        default=0.5,
        metadata={
            "help": "fraction of the fragments of a chosen document that are rearranged",
            "flag": "--fim-fragment-rate",
        },
    )
    no_prefix: str | None = field(
        default=None,
        metadata={
            "help": "leave documents that begin with this text unchanged",
            "flag": "--fim-no-prefix",
        },
    )
    prefix_token: str = field(
        default="<fim_prefix>",
        metadata={"help": "token before the prefix", "flag": "--fim-prefix-token"},
    )
    middle_token: str = field(
        default="<fim_middle>",
        metadata={"help": "token before the middle", "flag": "--fim-middle-token"},
    )
    suffix_token: str = field(
        default="<fim_suffix>",
        metadata={"help": "token before the suffix", "flag": "--fim-suffix-token"},
    )

    def __post_init__(self) -> None:
        for option in fields(self):
            rate = getattr(self, option.name)
            if isinstance(rate, float | int) and not 0 <= rate <= 1:
                raise DataError(f"{option.metadata['flag']} {rate} is not a rate; give 0 to 1")
