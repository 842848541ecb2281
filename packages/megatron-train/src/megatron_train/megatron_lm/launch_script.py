"""Finds the training command in a launch script by reading the script.

No command is run. Variables, arrays, defaults (``${NAME:-default}``), positional parameters,
integer arithmetic and conditions that depend on them are evaluated as in Bash. What depends on
files, other commands, loops or functions is skipped and reported in notes, and what it may change
is unknown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_train.errors import TrainError
from megatron_train.megatron_lm.bash.interpreter import interpret

_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class LaunchCommand:
    """The command of a script that starts training.

    Attributes:
        program: File name of the Python program, such as ``pretrain_gpt.py``.
        launcher: Words before the program, such as those of torchrun.
        arguments: Words after the program: its flags and their values.
        line: Line of the command in the script.
        notes: One line for each construct that could not be evaluated.
        unset: Variables that were used without a value, with the line of their first use.
    """

    program: str
    launcher: tuple[str, ...]
    arguments: tuple[str, ...]
    line: int
    notes: tuple[str, ...]
    unset: Mapping[str, int]


def read_script(
    path: Path, positional: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> LaunchCommand:
    """Returns the command with which the Bash script ``path`` starts training.

    Args:
        path: Path of the script.
        positional: Arguments of the script, ``$1`` first.
        variables: Values of variables that the script expects in the environment.

    Raises:
        TrainError: The script cannot be parsed, or it starts no training.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise TrainError(
            f"{path} has more than {_MOST_BYTES} bytes, which is too large for a launch script"
        )
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TrainError(f"{path} is not a script: {error}") from error
    run = interpret(text, str(path), positional, variables or {})
    notes = tuple(run.variables.notes)
    if run.found is None:
        raise TrainError(
            f"{path} starts no program such as pretrain_gpt.py"
            + "".join(f"; {note}" for note in notes[:3])
        )
    program, launcher, words, line = run.found
    launcher, words = (tuple(word.replace("\0", "") for word in each) for each in (launcher, words))
    return LaunchCommand(program, launcher, words, line, notes, run.variables.unset)
