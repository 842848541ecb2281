"""The closing table of all sessions, and which of them a resumed run leaves out."""

import subprocess
from pathlib import Path

import pytest
from session_times import SessionTimes, source_state, take_part


def test_the_table_has_minutes_results_and_sums(tmp_path: Path) -> None:
    times = SessionTimes(tmp_path / "times", "a1b2")
    times.record("lint", 6.0, "passed")
    times.record("unit(megatron-ckpt)", 90.0, "failed")
    times.record("docs", 59.7, "passed")
    names = ("lint", "never run", "docs", "unit(megatron-ckpt)")
    assert times.table(names, ("docs",), 100.0).splitlines() == [
        "session              minutes  result",
        "lint                    0.10  passed",
        "docs                    0.99  passed (beside others)",
        "unit(megatron-ckpt)     1.50  failed",
        "all                     1.67",
        "2 passed, 1 failed",
    ]
    times.forget(["docs", "never run"])
    assert times.table(names, (), 0.0).endswith("1 passed, 1 failed")


def test_a_session_counts_if_it_passed_with_the_same_source(tmp_path: Path) -> None:
    first, second = SessionTimes(tmp_path, "a1b2"), SessionTimes(tmp_path, "c3d4")
    first.record("lint", 1.0, "passed")
    first.record("docs", 1.0, "failed")
    assert first.has_passed("lint")
    assert not first.has_passed("docs") and not first.has_passed("parity")
    assert not second.has_passed("lint")
    unnamed = SessionTimes(tmp_path, "")
    unnamed.record("lint", 1.0, "passed")
    assert not unnamed.has_passed("lint") and not first.has_passed("lint")


def test_only_a_commit_names_the_source(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        line = ["git", "-C", str(tmp_path), *who, *words]
        return subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip()

    assert source_state(tmp_path / "nowhere") == ""
    git("init", "-q")
    (tmp_path / "code.py").write_text("a = 1\n")
    assert source_state(tmp_path) == ""
    git("add", "code.py")
    git("commit", "-q", "-m", "Add code")
    assert source_state(tmp_path) == git("rev-parse", "HEAD")
    (tmp_path / "code.py").write_text("a = 2\n")
    assert source_state(tmp_path) == ""


@pytest.mark.parametrize(
    ("words", "sessions", "others"),
    [
        ([], ["a", "b", "c"], []),
        (["--resume"], ["a", "b", "c"], ["--resume"]),
        (["--part", "1"], ["a", "b"], []),
        (["-k", "x", "--part", "2", "--resume"], ["c"], ["-k", "x", "--resume"]),
    ],
)
def test_a_part_is_taken_out_of_the_arguments(words, sessions, others) -> None:
    assert take_part(words, (("a", "b"), ("c",))) == (sessions, others)


@pytest.mark.parametrize("words", [["--part", "0"], ["--part", "3"], ["--part"], ["--part", "x"]])
def test_an_unknown_part_is_refused(words) -> None:
    with pytest.raises(ValueError, match="use a number from 1 to 2"):
        take_part(words, (("a", "b"), ("c",)))
