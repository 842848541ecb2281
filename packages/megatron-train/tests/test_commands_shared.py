"""What the commands of all packages share: parsers, help, errors and exit statuses."""

import argparse
import io
import logging
import sys

import pytest
from megatron_train._command import CommandError, Help, Parser, run_command
from megatron_train.cli import main
from megatron_train.config.grouped_help import format_brief_help, format_whole_help


def parser(run=lambda arguments: 0):
    made = Parser(prog="tool")
    made.add_argument("--count", type=int, default=2, help="a number", metavar="N")
    made.add_argument("--rate", type=float)
    made.add_argument("--kind", choices=("plain", "fancy"))
    made.set_defaults(run=run)
    return made


def ended(capsys, run, words=()):
    """Returns the status of a command, and what it prints."""
    status = run_command(parser(run), list(words), lambda: (KeyError,))
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def failing(error):
    def run(arguments):
        raise error

    return run


@pytest.mark.parametrize("status", [0, 7])
def test_a_command_has_the_status_of_its_function(capsys, status):
    def run(arguments):
        print(arguments.count)
        return status

    assert ended(capsys, run) == (status, "2\n", "")
    assert ended(capsys, run, ["--count", "3"]) == (status, "3\n", "")


@pytest.mark.parametrize(
    ("error", "status", "printed"),
    [
        (CommandError("a\n  b", "c"), 2, "tool: error: a b\ntool: error: c\n"),
        (KeyError("x"), 1, "tool: error: 'x'\n"),
        (OSError(2, "No such file", "f"), 1, "tool: error: f: No such file\n"),
        (OSError(2, "No such file"), 1, "tool: error: No such file\n"),
        (OSError("full"), 1, "tool: error: full\n"),
        (KeyboardInterrupt(), 130, "tool: interrupted\n"),
    ],
    ids=repr,
)
def test_an_error_is_a_line_and_a_status(capsys, error, status, printed):
    assert ended(capsys, failing(error)) == (status, "", printed)


def test_an_error_that_no_user_can_cause_is_raised(capsys):
    with pytest.raises(ZeroDivisionError):
        ended(capsys, failing(ZeroDivisionError()))


def test_a_reader_that_is_gone_ends_a_command_without_a_message(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    status = run_command(parser(failing(BrokenPipeError())), [], tuple)
    print("lost")
    sys.stdout.close()
    assert status == 141 and capsys.readouterr() == ("", "")


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_output_is_passed_on_before_a_command_ends(words, monkeypatch):
    class Gone(io.StringIO):
        def flush(self):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    assert run_command(parser(), words, tuple) == 141
    monkeypatch.setattr(sys, "stdout", Gone())
    assert main(words or ["layout", "--world-size", "1"]) == 141


def test_an_interrupt_on_a_terminal_is_on_a_line_of_its_own(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert ended(capsys, failing(KeyboardInterrupt())) == (130, "", "\ntool: interrupted\n")


def test_warnings_are_lines_of_the_command_until_it_ends(capsys):
    logger = logging.getLogger("megatron_shared")
    logger.setLevel(logging.INFO)

    def run(arguments):
        logger.warning("%d files are %s", 2, "torn")
        logger.info("not shown")
        return 0

    before = list(logging.getLogger().handlers)
    assert ended(capsys, run) == (0, "", "tool: warning: 2 files are torn\n")
    with pytest.raises(ZeroDivisionError):
        ended(capsys, failing(ZeroDivisionError()))
    assert logging.getLogger().handlers == before


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        ("--cuont 3", ["unknown argument --cuont; did you mean --count?; see tool --help"]),
        ("--cuont=3", ["unknown argument --cuont; did you mean --count?; see tool --help"]),
        ("--cou 3", ["unknown argument --cou; see tool --help"]),  # no abbreviations
        ("word", ["unknown argument word; see tool --help"]),
        ("-- --cuont", ["unknown argument --cuont; did you mean --count?; see tool --help"]),
        (
            "--xyzzy --cuont --xyzzy",
            [
                "unknown argument --xyzzy",
                "unknown argument --cuont; did you mean --count?",
                "2 arguments cannot be used; see tool --help",
            ],
        ),
        ("--count x", ["--count needs an integer, got 'x'; see tool --help"]),
        ("--rate x", ["--rate needs a number, got 'x'; see tool --help"]),
        ("--rate nan", ["--rate needs a finite number, got 'nan'; see tool --help"]),
        ("--rate=-inf", ["--rate needs a finite number, got '-inf'; see tool --help"]),
        ("--kind fanzy", ["unknown --kind 'fanzy'; did you mean fancy? (known: plain, fancy)"]),
    ],
)
def test_a_wrong_command_line_is_reported(capsys, words, lines):
    status, out, err = ended(capsys, lambda arguments: pytest.fail("it runs"), words.split())
    assert (status, out) == (2, "")
    found = err.splitlines()
    assert len(found) == len(lines)
    for line, expected in zip(found, lines, strict=True):
        assert line.startswith(f"tool: error: {expected}")


def test_two_dashes_alone_are_no_argument():
    assert parser().parse_args(["--", "--"]).count is parser().parse_args([]).count


def test_words_after_two_dashes_are_no_options():
    words = ["--count", "--cuont=3", "-x", "--", "--cuont"]
    assert parser().find_unknown_options(words) == [1]
    assert parser().find_unknown_options(words[:3]) == [1]


def described(words, **settings):
    """Returns the help of one flag."""
    made = Parser(prog="tool")
    made.add_argument("--flag", help=words, **settings)
    text = " ".join(made.format_help().split())
    return text.rpartition("--flag ")[2].removeprefix("FLAG ")


@pytest.mark.parametrize(
    ("words", "settings", "shown"),
    [
        ("a word", {"default": "x"}, "a word [default x]"),
        ("a word", {"default": 0, "type": int}, "a word [default 0]"),
        ("words", {"default": ("x", "y")}, "words [default x y]"),
        ("words", {"default": ["x"]}, "words [default x]"),
        ("a share", {"default": "50%"}, "a share [default 50%]"),
        ("a word", {}, "a word"),
        ("a word", {"required": True}, "a word [required]"),
        ("a word", {"default": argparse.SUPPRESS}, "a word"),
        ("a switch", {"action": "store_true"}, "a switch"),
        ("a word [default: none]", {"default": "x"}, "a word [default: none]"),
    ],
)
def test_help_has_the_default_of_a_flag(words, settings, shown):
    assert described(words, **settings) == shown


def test_help_of_an_argument_has_no_default():
    made = Parser(prog="tool")
    made.add_argument("file", nargs="?", default="x", help="a file")
    assert "a file\n" in made.format_help()


@pytest.mark.parametrize(("columns", "width"), [("60", 60), ("100", 100), ("300", 100)])
def test_help_is_as_wide_as_the_terminal_and_at_most_100_columns(columns, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    longest = f"{'x' * (width - 2)} y"
    end = f"first line\n  second line\n{longest}\n{longest}y"
    made = Parser(prog="tool", description="well-known " * 100, epilog=end)
    made.add_argument("--flag", help="well-known " * 50)
    text = made.format_help()
    lengths = [len(line) for line in text.splitlines()]
    assert max(lengths) == width
    assert text.endswith(f"first line\n  second line\n{longest}\n{longest[:-2]}\nyy\n")
    assert not [line for line in text.splitlines() if line.endswith("-")]
    assert Help("tool")._max_help_position == min(38, width - 20)


def test_an_option_of_a_subcommand_stands_after_its_name(capsys):
    made = Parser(prog="tool")
    made.add_argument("--quiet", action="store_true")
    actions = made.add_subparsers(metavar="ACTION", required=True)
    actions.add_parser("make").add_argument("--count")
    for words, message in (
        (["--count", "3", "make"], "give the action before --count (one of make); see tool --help"),
        (["--quite", "make"], "unknown argument --quite; did you mean --quiet?; see tool --help"),
        (["make", "--cuont"], "unknown argument --cuont; did you mean --count?; see tool make --h"),
        (["maek"], "unknown action 'maek'; did you mean make? (known: make); see tool --help"),
        ([], "the following arguments are required: ACTION; see tool --help"),
    ):
        with pytest.raises(CommandError, match=r".") as caught:
            made.parse_args(words)
        assert caught.value.lines[0].startswith(message)
    assert made.parse_args(["--quiet", "make", "--count", "3"]).count == "3"
    made.add_argument("--level")
    assert made.parse_args(["--level", "3", "make"]).level == "3"
    with pytest.raises(CommandError, match="see tool --help"):
        made.parse_args(["--level", "3", "--lev", "4", "make"])  # no abbreviations


# -- groups of flags -------------------------------------------------------------------------------


def grouped(*names):
    """Returns the lines of the groups in the brief help of a parser of flags by group."""
    made, groups = Parser(prog="tool"), {}
    for number, flags in enumerate(names):
        group = groups["ab" * (number + 1)] = made.add_argument_group(f"title {number}")
        for flag in flags:
            group.add_argument(flag, help=argparse.SUPPRESS if "hidden" in flag else "a flag")
    lines = format_brief_help(made, groups).splitlines()
    start = lines.index("groups of flags (--help-all GROUP shows those of a group):")
    return lines[start + 1 :]


def test_a_group_is_a_line_with_the_number_of_its_flags_and_the_first_of_them(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    short, long, longer = f"--{'x' * 38}", f"--{'y' * 40}", f"--{'y' * 41}"
    lines = grouped(["--one", "--hidden"], ["--a", "--hidden-too", "--b", "--c"])
    assert lines == ["  ab      1 flag  --one", "  abab    3 flags --a, --b, --c"]
    whole = f"  ab    2 flags {short}, {long}"
    assert len(whole) == 100 and grouped([short, long]) == [whole]
    assert grouped([short, longer]) == [f"  ab    2 flags {short}, ..."]
    assert grouped([short, long, "--z"]) == [f"  ab    3 flags {short}, ..."]
    assert grouped([f"--{'x' * 90}", "--z"]) == ["  ab    2 flags ..."]


def test_other_groups_and_whole_help_show_every_flag():
    made = Parser(prog="tool", description="Do it.", epilog="the end")
    made.add_argument("--plain", help="a flag of its own")
    first, second = (made.add_argument_group(f"title {n}", f"about {n}") for n in (1, 2))
    first.add_argument("--one", help="the first flag")
    second.add_argument("--two", help="the second flag")
    brief = format_brief_help(made, {"first": first, "second": second})
    assert "a flag of its own" in brief and "the first flag" not in brief
    assert "  first     1 flag  --one\n  second    1 flag  --two\n" in brief
    for groups, shown in (((), "-h --plain --one --two"), ([second], "--two")):
        text = format_whole_help(made, groups)
        flags = [line.split()[0].rstrip(",") for line in text.splitlines() if line[:3] == "  -"]
        assert flags == shown.split()
        assert "Do it." in text and text.endswith("the end\n") and "about 2" in text
