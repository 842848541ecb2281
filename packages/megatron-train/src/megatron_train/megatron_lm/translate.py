"""Translates the flags of a Megatron-LM command line into settings of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_train.config.values import GivenValue, Values
from megatron_train.megatron_lm.table import MegatronFlag

OUTCOMES = ("accepted", "no effect", "dropped", "planned", "refused", "unknown")
"""The possible outcomes for a flag of a command line, in the order of printed tables."""

_PRETRAIN = "megatron-train pretrain"


@dataclass(frozen=True)
class FlagArguments:
    """A flag with its values."""

    flag: str
    values: tuple[str, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """The flag and its values as words of a command line."""
        return (self.flag, *self.values)


@dataclass
class TranslatedFlags:
    """The translated flags of a command line.

    Attributes:
        arguments: Flags that `pretrain gpt` accepts, with their values.
        flags_by_outcome: Flags by their outcome, see `OUTCOMES`.
        notes: One line for each reason why flags have no effect.
        errors: One line for each flag that cannot be used or has invalid values.
    """

    arguments: list[str] = field(default_factory=list)
    flags_by_outcome: dict[str, list[str]] = field(
        default_factory=lambda: {outcome: [] for outcome in OUTCOMES}
    )
    notes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Returns the number of different flags with each outcome."""
        return {kind: len(set(flags)) for kind, flags in self.flags_by_outcome.items()}


def translate(
    words: Sequence[str],
    table: Mapping[str, MegatronFlag],
    drop: Sequence[str] = (),
    kind: str = "gpt",
) -> TranslatedFlags:
    """Sorts the flags of a Megatron-LM command line by their outcome.

    Args:
        words: The command line after the program.
        table: Megatron-LM's flags.
        drop: Flags to leave out.
        kind: Kind of the model. The table has flags of ``pretrain gpt``, which other kinds share,
            and those that only other kinds have.
    """
    groups, stray = _groups(words)
    result = TranslatedFlags()
    reasons: dict[str, list[str]] = {}
    result.errors += [f"{word!r} does not follow a flag" for word in stray]
    given = {group.flag for group in groups}
    result.errors += [
        f"--drop {flag}: the script does not use this flag" for flag in drop if flag not in given
    ]
    for group in groups:
        flag = table.get(group.flag)
        outcome = _outcome(group, flag, kind)
        if group.flag in drop:
            result.flags_by_outcome["dropped"].append(group.flag)
            continue
        result.flags_by_outcome[outcome].append(group.flag)
        if flag is None:
            result.errors.append(f"unknown argument {group.flag}")
        elif outcome in ("planned", "refused"):
            result.errors.append(flag.invalid_value_message(group.values) or flag.message())
        elif outcome == "no effect":
            reasons.setdefault(flag.reason, []).append(group.flag)
        elif message := _values_message(group, flag):
            result.errors.append(message)
        else:
            result.arguments += [group.flag, *map(_unquoted, group.values)]
    result.errors = list(dict.fromkeys(result.errors))
    _drop_ignored_settings(result)
    result.notes += [
        f"{', '.join(dict.fromkeys(flags))}: no effect here: {reason}"
        for reason, flags in reasons.items()
    ]
    return result


def apply_megatron_defaults(translation: TranslatedFlags, values: Values) -> Values:
    """Returns settings with which a run computes what the flags mean in Megatron-LM.

    Sets defaults of Megatron-LM that differ from ours. Removes options of tokenizers that the run
    does not use, which Megatron-LM ignores.

    Args:
        translation: The translated flags; a note is added for each change.
        values: The settings made from the flags.
    """
    given: dict[str, GivenValue] = {}
    if "training.calculate_per_token_loss" not in values.given:
        given["training.calculate_per_token_loss"] = GivenValue(False, "default of Megatron-LM")
        translation.notes.append(
            "calculate_per_token_loss is set to false, the default of Megatron-LM: every "
            "micro-batch has the same weight in the loss"
        )
    fused = values.get("placement.bias_gelu_fusion") is not False
    biased = values.get("model.add_bias_linear") is not False
    if "model.activation" not in values.given and fused and biased:
        given["model.activation"] = GivenValue("gelu_tanh", "default of Megatron-LM")
        translation.notes.append(
            "activation is set to gelu_tanh: Megatron-LM computes this approximation if GELU is "
            "fused with the bias, which is its default"
        )
    remaining = dict(values.given)
    kind = values.get("data.tokenizer_type")
    for key in ("data.tiktoken_pattern", "data.tiktoken_num_special_tokens"):
        if key in remaining and kind not in (None, "TikTokenizer"):
            flag = remaining.pop(key).origin
            translation.flags_by_outcome["accepted"].remove(flag)
            translation.flags_by_outcome["no effect"].append(flag)
            translation.notes.append(f"{flag}: no effect with --tokenizer-type {kind}")
    return Values({**given, **remaining})


def _groups(words: Sequence[str]) -> tuple[list[FlagArguments], list[str]]:
    """Splits a command line into flags with values, and the words before the first flag."""
    cut: list[list[str]] = []
    stray: list[str] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            cut.append([name, value] if equals else [name])
        elif cut:
            cut[-1].append(word)
        else:
            stray.append(word)
    return [FlagArguments(flag, tuple(values)) for flag, *values in cut], stray


def _outcome(group: FlagArguments, flag: MegatronFlag | None, kind: str) -> str:
    if flag is None:
        return "unknown"
    if flag.invalid_value_message(group.values):
        return "refused"
    if flag.status in ("works", "alias"):
        own = f"{_PRETRAIN} {kind}" in flag.commands
        return "accepted" if flag.accepted or own else "refused"
    return flag.status


def _values_message(group: FlagArguments, flag: MegatronFlag) -> str:
    """Returns an error line if values are missing, excess or unexpanded, else an empty string."""
    unexpanded = [value for value in group.values if "$(" in value or "${" in value]
    if unexpanded:
        return (
            f"{group.flag} {unexpanded[0]}: the value is only known when the script runs; write "
            "the value into the script"
        )
    count, wanted = len(group.values), flag.arity
    if (wanted == "+" and count) or wanted == "*" or wanted == count:
        return ""
    shown = f"{group.flag} {' '.join(group.values)}".strip()
    if not count:
        return f"{shown} has no value: its variable is empty"
    return f"{shown}: the flag takes {wanted} values, got {count}"


def _unquoted(value: str) -> str:
    """Returns a value without quotes that a variable contained."""
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1]
    return value


def _drop_ignored_settings(result: TranslatedFlags) -> None:
    """Removes settings that Megatron-LM ignores because another flag is missing."""
    queries = "--num-query-groups"
    if queries in result.arguments and "--group-query-attention" not in result.arguments:
        index = result.arguments.index(queries)
        del result.arguments[index : index + 2]
        result.flags_by_outcome["accepted"].remove(queries)
        result.flags_by_outcome["no effect"].append(queries)
        result.notes.append(
            f"{queries}: no effect in Megatron-LM without --group-query-attention, which is missing"
        )
