"""Random launch scripts that `config from-megatron` reads, and what Bash makes of them."""

import random
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

_SCALARS = ("A", "B", "C", "N_1")
_ARRAYS = ("L", "M")
_NUMBERS = ("I", "J")
_UNSET = ("U", "V_2")
_TEXT = (
    "a",
    "bc",
    "7",
    "x.y",
    "q/zq",
    "k=v",
    "-1",
    "a:b",
    ":",
    "--f",
    "%",
    "a@b",
    "+",
    "_",
    "a,b",
    "{a}",
)
_GLOBS = ("*", "?", "[ab]", "[!x]", "[", "]", "*b", "a*")
_SPACES = (" ", "  ", "\t", " \n ")
_SEPARATORS = ("':'", "' '", "', '", "$' \\t\\n'", "'x:'")
_BINARY = (
    *("+", "-", "*", "/", "%", "**", "<<", ">>", "&", "|", "^", "&&", "||"),
    *("==", "!=", "<", ">", "<=", ">=", ","),
)
_CHANGED_LIST = re.compile(r"\$\{(?:@|\w+\[@\])[#%^,]")
_DRIVER = """torchrun() { printf '%s\\0' "$#" "$@" >> "$ANSWER"; }
python3() { torchrun "$@"; }
python() { torchrun "$@"; }
export -f torchrun python3 python
cd "$1" || exit 1
shift
for script; do
    read -r -d '' -a words < "$script.words"
    ANSWER="$script.answer" "$BASH" "$script" "${words[@]}" > /dev/null 2>&1 < /dev/null
done
"""


class RandomScript:
    """Writes a random script; each draw is one expression, word or command."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self.arguments = [self._pick("p", "q.r", "7") for _ in range(self._random.randrange(4))]

    def text(self) -> str:
        """Returns the script."""
        draw = self._random
        lines = ["#!/bin/bash"]
        if draw.random() < 0.2:
            lines.append(self._pick("set -e", "set -f", "set -eo pipefail", "set -x", "set +x"))
        lines += [self._assignment() for _ in range(draw.randrange(3, 7))]
        lines += [self._command(0) for _ in range(draw.randrange(2, 9))]
        words = [self._word() for _ in range(draw.randrange(1, 7))]
        launcher = self._pick("torchrun", "python3", "python", "exec_none=1 torchrun")
        lines.append(f"{launcher} pretrain_gpt.py {self._spaced(words)}{self._tail()}")
        return "\n".join(lines) + "\n"

    def _pick(self, *choices: str) -> str:
        return self._random.choice(choices)

    def _spaced(self, words: Sequence[str]) -> str:
        return "".join(self._pick(" ", " ", "  ", " \\\n    ", "\t") + word for word in words)

    def _tail(self) -> str:
        return self._pick(
            "", "", "  # --comment $A", " 2>&1", " > /dev/null", " | cat", " &", " || exit 1"
        )

    def _chance(self, chance: float) -> bool:
        return self._random.random() < chance

    # words

    def _word(self, depth: int = 0) -> str:
        pieces = [self._piece(depth) for _ in range(self._random.choice((1, 1, 1, 2, 2, 3)))]
        if self._chance(0.04):
            pieces.insert(0, self._pick("~", "~/a", "--x=~", "a=~/b"))
            return pieces[0] + ("/" + "".join(pieces[1:]) if self._chance(0.5) else "")
        text = "".join(pieces)
        return "x" + text if text.startswith("#") else text

    def _piece(self, depth: int) -> str:
        kind = self._random.randrange(12 if depth < 3 else 4)
        if kind < 2:
            return self._pick(*_TEXT, *_TEXT, *_GLOBS)
        if kind == 2:
            return "'" + self._inside() + "'"
        if kind == 3:
            return self._pick(
                "\\$", "\\ ", '\\"', "\\\\", "\\a", "\\*", "$'a\\tb\\'c'", '$"d e"', "\\~", "\\'"
            )
        if kind < 8:
            return self._parameter(depth, False)
        if kind < 11:
            return self._double(depth)
        return f"$(({self._expression(0)}))"

    def _inside(self) -> str:
        return "".join(
            self._pick(*_TEXT, *_GLOBS, *_SPACES, "$A", '"', "\\", "#", "~", "")
            for _ in range(self._random.randrange(4))
        )

    def _double(self, depth: int) -> str:
        pieces = []
        for _ in range(self._random.randrange(4)):
            kind = self._random.randrange(6)
            if kind == 0:
                pieces.append(self._pick(*_TEXT, *_GLOBS, *_SPACES, "'", "~", "#", "{a,b}"))
            elif kind == 1:
                pieces.append(self._pick("\\$", "\\\\", '\\"', "\\`", "\\a", "\\\n", "$ "))
            elif kind == 2:
                pieces.append(f"$(({self._expression(0)}))")
            else:
                pieces.append(self._parameter(depth + 1, True))
        if self._chance(0.2):
            pieces = [self._pick("${A:=b c}", "${B=}", "${C^^}", "${A,}", "${N_1:=$*}")]
        return '"' + "".join(pieces) + '"'

    def _parameter(self, depth: int, quoted: bool) -> str:
        kind = self._random.randrange(14)
        name = self._pick(*_SCALARS, *_UNSET, *_NUMBERS)
        array = self._pick(*_ARRAYS, *_SCALARS, *_UNSET)
        if kind < 3:
            return self._pick(f"${{{name}}}", f"${{{name}}}", f"${name}%")
        if kind == 3:
            return self._pick("$1", "$2", "${3}", "$#", "${10}", "$@", "$*", "${@}", "${#1}")
        if kind == 4:
            return self._pick("$@", "$*", "${@}", "${*}")
        if kind in (5, 6):
            index = self._pick("@", "@", "*", "0", "1", "I & 3", "${I:-1}&1", "1+1")
            return f"${{{array}[{index}]}}"
        if kind == 7:
            return self._pick(
                f"${{#{name}}}", f"${{#{array}[@]}}", "${#@}", f"${{#{array}[*]}}", f"${{#{array}}}"
            )
        target = self._pick(
            name, name, "1", "2", "@", "*", f"{array}[@]", f"{array}[*]", f"{array}[1]", array
        )
        if depth > 2:
            return f"${{{name}}}"
        if kind in (8, 9) and quoted and "*" in target:
            target = "@"  # Bash joins a changed "${*}" in one way alone and in another beside "$@"
        if kind == 8:
            action = self._pick("#", "##", "%", "%%")
            return f"${{{target}{action}{self._pattern(depth)}}}"
        if kind == 9 and quoted:
            return f"${{{name}}}"
        if kind == 9 and self._chance(0.4):
            return f"${{{target}{self._pick('^', '^^', ',', ',,')}}}"
        if kind == 9:
            name = self._pick(*_SCALARS, *_UNSET)
            return f"${{{name}{self._pick('=', ':=')}{self._operand(depth, quoted)}}}"
        action = self._pick("-", ":-", "+", ":+", ":-", "-")
        return f"${{{target}{action}{self._operand(depth, quoted)}}}"

    def _pattern(self, depth: int) -> str:
        return "".join(
            self._pick(
                "*",
                "?",
                "a",
                "b",
                "[a-c]",
                "[!b]",
                ".",
                ":",
                "'*'",
                '"?"',
                "$A",
                '"$B"',
                "\\*",
                "-",
            )
            for _ in range(self._random.randrange(1, 3))
        )

    def _operand(self, depth: int, quoted: bool) -> str:
        pieces = []
        for _ in range(self._random.randrange(3)):
            kind = self._random.randrange(7)
            if kind < 2:
                pieces.append(self._pick(*(text for text in (*_TEXT, *_GLOBS) if "}" not in text)))
            elif kind == 2:
                pieces.append(self._pick(" ", "  ", "\\}", "\\a", "\\$", "\\\\"))
            elif kind == 3 and not quoted:
                pieces.append(self._pick("'a b'", "'}'", '"a  b"', "''", '""'))
            elif kind == 3:
                pieces.append(self._pick("'a b'", '"a  b"', "''", '""'))
            else:
                inner = self._parameter(depth + 1, quoted)
                pieces.append("$*" if "@" in inner else inner)
        if not quoted and self._chance(0.1):
            return self._pick('"$@"', '"${L[@]}"')
        return "".join(pieces)

    # arithmetic

    def _expression(self, depth: int) -> str:
        kind = self._random.randrange(12)
        if depth > 3 or kind < 3:
            return self._pick(
                *("0", "1", "2", "3", "7", "10", "64", "010", "0x1F", "2#101", "36#zZ", "64#_"),
                *(
                    "9223372036854775807",
                    "I",
                    "${I:-2}",
                    "J",
                    "${J:=5}",
                    "E",
                    "${W:-3}",
                    "(I)",
                    "${#L[@]}",
                    "E",
                ),
            )
        if kind == 3:
            return self._pick("-", "+", "!", "~", "- -", "!!") + self._operand_of(depth)
        if kind == 4:
            return f"({self._expression(depth + 1)})"
        if kind == 5:
            parts = [self._operand_of(depth) for _ in range(3)]
            return f"{parts[0]} ? {parts[1]} : {parts[2]}"
        if kind == 6 and self._chance(0.4):
            name = self._pick(*_NUMBERS)
            sign = self._pick("=", "+=", "-=", "*=", "<<=", ">>=", "&=", "|=", "^=")
            return f"({name}{sign}{self._expression(depth + 1)})"
        if kind == 6:
            name = self._pick(*_NUMBERS)
            return self._pick(f"{name}++", f"({name}--)", f"(++{name})", f"(--{name})")
        sign = self._pick(*_BINARY)
        right = self._operand_of(depth)
        if sign in ("/", "%"):
            right = self._pick("3", "7", "-2", "(-5)", "64")
        if sign == "**":
            right = self._pick("0", "1", "2", "5", "2**3")
        space = self._pick("", " ")
        if right.startswith(("-", "+", "&", "|")) or not space:
            space = " "
        return f"{self._operand_of(depth)}{space}{sign}{space}{right}"

    def _operand_of(self, depth: int) -> str:
        text = self._expression(depth + 1)
        return f"({text})" if self._chance(0.3) else text

    # commands

    def _assignment(self) -> str:
        kind = self._random.randrange(9)
        name = self._pick(*_SCALARS)
        if kind < 3:
            constant = f"readonly R_{self._random.randrange(10**9)}=1; "
            prefix = self._pick("", "", "export ", constant, "declare ")
            return f"{prefix}{name}={self._value()}"
        if kind == 3:
            return f"{name}+={self._value()}"
        if kind == 4:
            number = self._pick("3", "-4", "0", "'1+2'", "E", "10", '"$((I+1))"', "")
            return f"{self._pick(*_NUMBERS)}={number}"
        array = self._pick(*_ARRAYS)
        words = [self._word(1) for _ in range(self._random.randrange(4))]
        items = self._spaced(["x" + word if word.startswith("[") else word for word in words])
        if kind == 5:
            return f"{array}+=({items} )"
        if kind == 6:
            index = self._pick("0", "1", "2", "I & 3", "$((1))")
            return f"{array}[{index}]{self._pick('', '+')}={self._value()}"
        return f"{array}=({items}{self._pick('', chr(10), ' # c' + chr(10))})"

    def _value(self) -> str:
        if self._chance(0.05):
            return self._pick("~", "~/a:~/b", "a:~", "x~")
        text = self._word(1)
        while _CHANGED_LIST.search(text):  # Bash joins its elements in more than one way
            text = self._word(1)
        return self._pick("", text, text, text, text)

    def _command(self, depth: int) -> str:
        kind = self._random.randrange(20)
        if kind < 7:
            return self._assignment()
        if kind == 7:
            return self._pick(
                "shift", "shift 2", "shift 0", "shift 9", ": ${A:=b c}", "true", ": # a comment '"
            )
        if kind == 8:
            return (
                f"set -- {self._spaced([self._word(1) for _ in range(self._random.randrange(4))])}"
            )
        if kind == 9 and self._chance(0.7):
            return self._pick(*(f"IFS={each}" for each in _SEPARATORS), "unset IFS")
        if kind == 10:
            return f"unset {self._pick(*_SCALARS, *_ARRAYS, *_NUMBERS)}"
        if kind == 11:
            return f"(( {self._expression(0)} )) {self._pick('&& A=yes', '|| A=no', '|| :')}"
        if kind == 12 and depth < 2:
            return f"{{ {self._command(depth + 1)}\n}}"
        if kind == 13 and depth < 2:
            return f"( {self._command(depth + 1)}\n)"
        if kind == 14:
            return self._pick("eval A=c", "eval 'B=$A'", 'eval "C=x  D=y"', "eval A='$1' # '")
        if kind == 15:
            return f"{self._condition()} {self._pick('&&', '||')} {self._assignment()}"
        if depth > 1:
            return self._assignment()
        body = f"if {self._condition()}; then\n    {self._command(depth + 1)}\n"
        if self._chance(0.4):
            body += f"elif {self._condition()}\nthen {self._command(depth + 1)}\n"
        if self._chance(0.6):
            body += f"else\n    {self._command(depth + 1)}\n"
        return body + "fi"

    def _condition(self) -> str:
        name = self._pick(*_SCALARS, *_UNSET)
        first, second = self._word(2), self._word(2)
        comparison = self._pick("eq", "ne", "lt", "le", "gt", "ge")
        number = self._pick("3", "I", "${I:-1}", "-1", "J+1")
        return self._pick(
            f'[ "${name}" = {first} ]',
            f"[ ${name} = {first} ]",
            f"[ -n ${name} ]",
            f'[ -z "${name}" ]',
            f"[ ${{{name}}} ]",
            f'[ ! "${name}" = "{self._pick("a", "$B")}" ]',
            f'[ -z "${name}" -o "$A" = a -a "$B" != b ]',
            f"[ {first} ]",
            f"test {first} != {second}",
            f"[ $# -{comparison} {self._pick('1', '2', '${I:-1}')} ]",
            f"[[ ${name} == {self._simple_pattern()} ]]",
            f'[[ "${name}" != {self._simple_pattern()} && -n $A ]]',
            f"[[ -z ${name} || ( ! $B = a && ${name} == '*' ) ]]",
            f"[[ ${name} ]]",
            f"[[ $# -{comparison} {number} ]]",
            f"[[ -v {self._pick('A', 'U', 'B')} ]]",
            "! true",
            "true",
            "false",
        )

    def _simple_pattern(self) -> str:
        return self._pick("a*", "*", "'*'", '"$A"', "$A", "?", "[ab]*", "a:b", "*.y", '"a"*', "$B*")


def write_scripts(folder: Path, seeds: Sequence[str]) -> list[tuple[Path, list[str]]]:
    """Writes a random script for each seed; returns paths and arguments."""
    scripts = []
    for index, seed in enumerate(seeds):
        script = RandomScript(seed)
        path = folder / f"script{index}.sh"
        path.write_text(script.text())
        path.with_name(path.name + ".words").write_text(" ".join(script.arguments) + "\n")
        scripts.append((path, script.arguments))
    return scripts


def answers_of_bash(
    scripts: Sequence[tuple[Path, list[str]]], empty_folder: Path
) -> list[list[str] | None]:
    """Runs scripts with Bash; returns the words that each passes to its first training command.

    One Bash process starts one for each script. None: the script ends before it.
    """
    paths = [str(path) for path, _ in scripts]
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/home/h", "LC_ALL": "C.UTF-8"}
    command = ["bash", "-c", _DRIVER, "bash", str(empty_folder), *paths]
    subprocess.run(command, check=True, env=environment, timeout=600)
    answers: list[list[str] | None] = []
    for path in paths:
        answer = Path(path + ".answer")
        if not answer.exists():
            answers.append(None)
            continue
        count, *words = answer.read_bytes().decode().split("\0")[:-1]
        answers.append(words[: int(count)])
    return answers
