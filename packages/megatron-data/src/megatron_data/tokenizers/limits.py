"""Limits on the work of chat templates."""

from dataclasses import dataclass, field

from megatron_data.errors import DataError


@dataclass(frozen=True)
class TemplateLimits:
    """Limits on the work of a chat template for one conversation.

    The limit is on steps and not on time, so that every machine refuses the same conversations. An
    element of a list costs at least 1 step, a filter 8, a call 32, and 64 characters read or
    written cost 1.

    Attributes:
        steps: Steps for one conversation; 20 million take about 10 seconds.
        characters: Characters of each intermediate text and of the result.

    Raises:
        DataError: A limit is below 1.
    """

    steps: int = field(
        default=20_000_000,
        metadata={
            "help": "largest number of steps of the template per conversation",
            "flag": "--max-template-steps",
        },
    )
    characters: int = field(
        default=1 << 26,
        metadata={
            "help": "largest number of characters of a text that the template makes",
            "flag": "--max-template-characters",
        },
    )

    def __post_init__(self) -> None:
        if min(self.steps, self.characters) < 1:
            raise DataError(
                f"a template of {self.steps} steps and {self.characters} characters; give at "
                "least 1 of each"
            )
