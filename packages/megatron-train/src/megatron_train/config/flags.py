"""Command-line flags generated from options."""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_train import _command
from megatron_train.config.options import Option
from megatron_train.config.values import GivenValue, Values
from megatron_train.errors import TrainError, UsageError, collect_errors

if TYPE_CHECKING:
    from megatron_train.megatron_lm.table import MegatronFlag

_PREFIX = "option:"
_WEAK = "weak:"
_LONGEST_CHOICES = 80
"""Columns that the choices may take after a flag; longer lists are part of the help text."""

FLAG_VALUE = object()
"""Stands in an alias for the value given with the flag."""


@dataclass(frozen=True)
class Alias:
    """A flag that sets other options.

    Attributes:
        sets: Pairs of an option's key and its value; `FLAG_VALUE` stands for the flag's value.
        help: One line of help.
        weak: Whether a value given for the option itself overrides the alias.
        convert: Converts the flag's value to that of the option. It raises `TrainError`.
    """

    sets: tuple[tuple[str, Any], ...]
    help: str
    weak: bool = False
    convert: Callable[[str], str | bool] = str

    @property
    def takes_value(self) -> bool:
        """Whether the flag takes a value."""
        return any(value is FLAG_VALUE for _, value in self.sets)


def _window_tokens(text: str) -> str:
    """Returns the tokens of a window, from Megatron-LM's numbers of tokens on both sides."""
    before, comma, after = text.strip().removeprefix("(").removesuffix(")").partition(",")
    try:
        left, right = int(before), int(after)
    except ValueError:
        left, right = -2, 0
    if not comma or left < -1:
        raise TrainError(f"{text!r} is not two numbers of tokens L,R; use for example 127,0")
    if right not in (0, -1) or (right == -1 and left != -1):
        raise TrainError(f"{text!r}: causal attention has no tokens after its own; use {left},0")
    return str(left + 1)


def _inverse(text: str) -> str:
    """Returns 1 / X, the divisor that stands for a factor."""
    try:
        return repr(1 / float(text))
    except (ValueError, ZeroDivisionError):
        raise TrainError(f"{text!r} is not a number other than 0; use for example 0.25") from None


def _is_fp32(text: str) -> bool:
    """Returns whether a format of gradients is fp32 and not bf16."""
    if text not in ("fp32", "bf16"):
        raise TrainError(f"{text!r} is not a format of gradients; use fp32 or bf16")
    return text == "fp32"


ALIASES: Mapping[str, Alias] = {
    "--encoder-seq-length": Alias((("data.seq_length", FLAG_VALUE),), "the same as --seq-length"),
    "--decoder-num-layers": Alias((("model.num_layers", FLAG_VALUE),), "the same as --num-layers"),
    "--window-size": Alias(
        (("model.sliding_window", FLAG_VALUE),),
        "the same as --sliding-window L+1, for L,0; -1 for L means no window",
        convert=_window_tokens,
    ),
    "--mup-embedding-mult": Alias(
        (("model.embedding_multiplier", FLAG_VALUE),), "the same as --embedding-multiplier"
    ),
    "--mup-output-mult": Alias(
        (("model.logits_scaling", FLAG_VALUE),),
        "the same as --logits-scaling 1/X",
        convert=_inverse,
    ),
    "--grad-reduce-in-bf16": Alias(
        (("data_parallel.accumulate_allreduce_grads_in_fp32", False),),
        "the same as --no-accumulate-allreduce-grads-in-fp32",
    ),
    "--main-grads-dtype": Alias(
        (("data_parallel.accumulate_allreduce_grads_in_fp32", FLAG_VALUE),),
        "fp32 is the same as --accumulate-allreduce-grads-in-fp32, and bf16 the opposite",
        convert=_is_fp32,
    ),
    "--grad-reduce-in-fp32": Alias(
        (("data_parallel.accumulate_allreduce_grads_in_fp32", True),),
        "the same as --accumulate-allreduce-grads-in-fp32",
    ),
    "--swiglu": Alias((("model.activation", "swiglu"),), "the same as --activation swiglu"),
    "--squared-relu": Alias(
        (("model.activation", "squared_relu"),), "the same as --activation squared_relu"
    ),
    "--quick-geglu": Alias(
        (("model.activation", "quick_geglu"),), "the same as --activation quick_geglu"
    ),
    "--openai-gelu": Alias(
        (("model.activation", "gelu_tanh"),), "the same as --activation gelu_tanh"
    ),
    "--group-query-attention": Alias(
        (("model.num_query_groups", 1),),
        "the same as --num-query-groups 1, unless --num-query-groups is given",
        weak=True,
    ),
    "--use-rotary-position-embeddings": Alias(
        (("model.position_embedding_type", "rope"),), "the same as --position-embedding-type rope"
    ),
    "--use-rope-scaling": Alias(
        (("model.rope_scaling_type", "llama3"),), "the same as --rope-scaling-type llama3"
    ),
    "--rotary-scaling-factor": Alias(
        (("model.rope_scaling_factor", FLAG_VALUE),), "the same as --rope-scaling-factor"
    ),
    "--yarn-original-max-position-embeddings": Alias(
        (("model.rope_scaling_original_length", FLAG_VALUE),),
        "the same as --rope-scaling-original-length",
    ),
    "--rotary-seq-len-interpolation-factor": Alias(
        (("model.rope_scaling_type", "linear"), ("model.rope_scaling_factor", FLAG_VALUE)),
        "the same as --rope-scaling-type linear --rope-scaling-factor X",
    ),
    "--fp8-e4m3": Alias((("low_precision.fp8_format", "e4m3"),), "the same as --fp8-format e4m3"),
    "--fp8-hybrid": Alias(
        (("low_precision.fp8_format", "hybrid"),), "the same as --fp8-format hybrid"
    ),
    "--disable-fp8-wgrad": Alias(
        (("low_precision.fp8_wgrad", False),), "the same as --no-fp8-wgrad"
    ),
    "--layernorm-epsilon": Alias(
        (("model.norm_epsilon", FLAG_VALUE),), "the same as --norm-epsilon"
    ),
    "--hybrid-override-pattern": Alias(
        (("model.hybrid_layer_pattern", FLAG_VALUE),), "the same as --hybrid-layer-pattern"
    ),
    "--recompute-activations": Alias(
        (("recompute.granularity", "selective"),), "the same as --recompute-granularity selective"
    ),
    "--moe-layer-recompute": Alias(
        (("recompute.granularity", "selective"), ("recompute.modules", ("moe",))),
        "the same as --recompute-granularity selective --recompute-modules moe",
    ),
    "--use-flash-attn": Alias(
        (("placement.attention_backend", "flash"),), "the same as --attention-backend flash"
    ),
    "--persistent-save-interval": Alias(
        (("checkpoint.save_interval", FLAG_VALUE),), "the same as --save-interval"
    ),
    "--use-checkpoint-opt_param-scheduler": Alias(
        (("checkpoint.use_checkpoint_opt_param_scheduler", True),),
        "the same as --use-checkpoint-opt-param-scheduler",
    ),
    "--virtual-pipeline-model-parallel-size": Alias(
        (("layout.vpp", FLAG_VALUE),), "the same as --num-virtual-stages-per-pipeline-rank"
    ),
}
"""Flags that set other options."""

ONE_VALUE: Mapping[str, str] = {
    "--moe-router-load-balancing-type": "give one of them, and the weights of the other losses "
    "with --moe-seq-aux-loss-coeff and --moe-global-aux-loss-coeff",
    "--moe-aux-loss-coeff": "give the weight of the loss that --moe-router-load-balancing-type "
    "names, and those of other losses with --moe-seq-aux-loss-coeff and "
    "--moe-global-aux-loss-coeff",
}
"""Flags that take a list in Megatron-LM and one value here, and what to give instead."""

_WITHOUT_EFFECT = "without_effect"


class Parser(_command.Parser):
    """The parser of every command. Knows Megatron-LM's flags too.

    Args:
        megatron: Whether to accept flags of Megatron-LM that have no effect here.
        flags: Adds flags to the parser when it is first used, since a command line uses one of
            many commands with hundreds of flags each.
        settings: Arguments of `_command.Parser`.
    """

    def __init__(
        self,
        *,
        megatron: bool = False,
        flags: "Callable[[Parser], None] | None" = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self._megatron = megatron
        self._flags = flags

    def complete(self) -> None:
        """Adds the flags that wait for the first use of this parser."""
        add, self._flags = self._flags, None
        if add is not None:
            add(self)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parses a command line with all flags, as `_command.Parser` does."""
        self.complete()
        return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
        """Returns the help with all flags."""
        self.complete()
        return super().format_help()

    def unknown_option_errors(self, words: Sequence[str]) -> list[str]:
        """Returns a line for each option that this command does not take.

        Options of Megatron-LM that have no effect here become options of this parser.
        """
        lines = [
            f"{flag} takes one value, not {' '.join(values)}; {ONE_VALUE[flag]}"
            for flag, *values in _lists(words)
            if flag in ONE_VALUE and flag in self._option_string_actions and values[1:]
        ]
        unknown_options = self.find_unknown_options(words)
        if not unknown_options:
            return lines
        from megatron_train.megatron_lm.table import megatron_flags

        table = megatron_flags()
        known = (*self._option_string_actions, *table)
        for index in unknown_options:
            name, equals, value = words[index].partition("=")
            flag = table.get(name)
            if flag is None:
                lines.append(f"unknown argument {name}{_command.nearest(name, known)}")
            elif not (self._megatron and flag.status == "no effect"):
                lines.append(flag.message())
            elif message := flag.invalid_value_message(
                [value] if equals else words[index + 1 :][:1]
            ):
                lines.append(message)
            elif name not in self._option_string_actions:
                self._accept(flag)
        return lines

    def _accept(self, flag: "MegatronFlag") -> None:
        nargs = None if flag.arity == 1 else flag.arity
        self.add_argument(
            flag.flag,
            nargs=nargs,
            action=_WithoutEffect,
            const=flag,
            dest=_WITHOUT_EFFECT,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )


def _lists(words: Sequence[str]) -> list[list[str]]:
    """Returns each flag of a command line with the words up to the next flag."""
    found: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--"):
            found.append([])
        found[-1].append(word)
    return [words for words in found if words]


class _WithoutEffect(argparse.Action):
    """Records a flag that has no effect."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        noted = getattr(namespace, self.dest, ())
        setattr(namespace, self.dest, (*noted, self.const))


def notes_on_ignored_flags(namespace: argparse.Namespace) -> list[str]:
    """Returns one line per reason for which flags in ``namespace`` have no effect."""
    by_reason: dict[str, list[str]] = {}
    for flag in getattr(namespace, _WITHOUT_EFFECT, ()):
        by_reason.setdefault(flag.reason, []).append(flag.flag)
    return [
        f"{', '.join(dict.fromkeys(flags))} {'has' if len(set(flags)) == 1 else 'have'} no effect "
        f"here: {reason}"
        for reason, flags in by_reason.items()
    ]


VALUE_ALIASES: Mapping[tuple[str, str], tuple[tuple[str, Any], ...]] = {
    ("optimizer.optimizer", "dist_muon"): (
        ("optimizer.optimizer", "muon"),
        ("data_parallel.use_distributed_optimizer", True),
    ),
}
"""Values of flags that stand for several options: pairs of keys and values, by key and value."""


class _Store(argparse.Action):
    """Stores a value and the given spelling of the flag under the key of its option."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if self.nargs == 0:
            values = self.const
        sets: tuple[tuple[str, Any], ...] = ((self.dest.removeprefix(_PREFIX), values),)
        if isinstance(values, str):
            sets = VALUE_ALIASES.get((sets[0][0], values), sets)
        for key, value in sets:
            setattr(namespace, _PREFIX + key, (value, option_string or ""))


class _StoreAlias(argparse.Action):
    """Stores the values that an alias sets under the keys of their options."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        prefix = _WEAK if self.const.weak else _PREFIX
        for key, value in self.const.sets:
            try:
                stored = self.const.convert(values) if value is FLAG_VALUE else value
            except TrainError as error:
                raise argparse.ArgumentError(self, str(error)) from None
            setattr(namespace, prefix + key, (stored, option_string or ""))


LAYERS_PER_VIRTUAL_STAGE = "--num-layers-per-virtual-pipeline-stage"
"""Megatron's other flag for the number of virtual stages; `resolve` does the division."""


def add_options(
    parser: argparse.ArgumentParser, options: Iterable[Option], titles: Mapping[str, str]
) -> dict[str, Any]:
    """Adds a flag for each option; returns the groups of flags by section."""
    groups: dict[str, Any] = {}
    for option in options:
        if option.section not in groups:
            groups[option.section] = parser.add_argument_group(titles[option.section])
        _add(groups[option.section], option)
        for flag, alias in ALIASES.items():
            if alias.sets[-1][0] == option.key:
                _add_alias(groups[option.section], flag, alias, option)
    return groups


def add_run_options(
    parser: argparse.ArgumentParser, options: Iterable[Option], titles: Mapping[str, str]
) -> None:
    """Adds the flags of a run: those of its options, and `LAYERS_PER_VIRTUAL_STAGE`."""
    add_options(parser, options, titles)["layout"].add_argument(
        LAYERS_PER_VIRTUAL_STAGE,
        metavar="N",
        help="layers in a virtual stage; sets the number of virtual stages to "
        "--num-layers / (pipeline ranks x N)",
    )


def _add(group: Any, option: Option) -> None:
    keep = _keep(option)
    text = describe(option).replace("%", "%%")
    if option.kind == "switch":
        group.add_argument(option.flag, nargs=0, const=option.flag_value(), help=text, **keep)
        other = argparse.SUPPRESS
        group.add_argument(
            option.opposite, nargs=0, const=not option.flag_value(), help=other, **keep
        )
        return
    metavar = "{" + ",".join(map(str, option.choices)) + "}" if option.choices else _metavar(option)
    if len(metavar) * (1 + option.repeated) > _LONGEST_CHOICES:  # argparse shows it twice
        metavar, text = "KIND", f"{', '.join(map(str, option.choices))}: {text}"
    group.add_argument(
        option.flag, nargs="+" if option.repeated else None, metavar=metavar, help=text, **keep
    )


def _add_alias(group: Any, flag: str, alias: Alias, option: Option) -> None:
    shown = {"metavar": _metavar(option)} if alias.takes_value else {"nargs": 0}
    group.add_argument(
        flag,
        action=_StoreAlias,
        const=alias,
        dest=_PREFIX + flag,
        default=argparse.SUPPRESS,
        help=alias.help,
        **shown,
    )


def _keep(option: Option) -> dict[str, Any]:
    return {"dest": _PREFIX + option.key, "default": argparse.SUPPRESS, "action": _Store}


def _metavar(option: Option) -> str:
    if option.unit == "path":
        return "PATH"
    # A value of an alias may set a switch.
    return {"integer": "N", "number": "X", "text": "TEXT", "switch": "TEXT"}[option.kind]


def describe(option: Option) -> str:
    """Returns the help of an option with its unit and default."""
    notes = []
    if option.unit and option.unit != "path":
        notes.append(option.unit)
    if option.derived_default:
        notes.append(f"default {option.derived_default}")
    elif option.required:
        notes.append("required")
    elif option.kind != "switch" and option.default not in (None, ""):
        notes.append(f"default {option.default_text}")
    elif option.kind == "switch" and option.default is True and option.flag_value():
        notes.append(f"on unless {option.opposite}")
    text = option.help
    if option.kind == "switch" and not option.flag_value():
        text = f"turn off: {text}"
    return text + (f" [{', '.join(notes)}]" if notes else "")


def given_flags(namespace: argparse.Namespace, options: Sequence[Option]) -> Values:
    """Returns the values of the given flags in ``namespace``."""
    return _stored(namespace, options, _PREFIX)


def implied_flags(namespace: argparse.Namespace, options: Sequence[Option]) -> Values:
    """Returns the values that weak aliases in ``namespace`` set."""
    return _stored(namespace, options, _WEAK)


def _stored(namespace: argparse.Namespace, options: Sequence[Option], prefix: str) -> Values:
    given: dict[str, GivenValue] = {}
    wrong: list[str] = []
    for option in options:
        stored = getattr(namespace, prefix + option.key, None)
        if stored is not None:
            value, spelling = stored
            with collect_errors(wrong):
                given[option.key] = GivenValue(option.coerce(value, spelling), spelling)
    if wrong:
        raise UsageError(*wrong, *([f"{len(wrong)} flags cannot be used"] if wrong[1:] else []))
    return Values(given)
