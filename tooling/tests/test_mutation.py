"""tooling/mutation on a small repository: what is tested is caught, what is not survives."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from mutation import table, targets
from mutation.defects import defects, difference, plant
from mutation.naming import in_function, naming_tests
from mutation.outcomes import Outcomes, checked, run_first_trials, run_trials
from mutation.plan import Planted, plan
from mutation.probes import probed
from mutation.reach import Reach
from mutation.scratch import Scratch
from mutation.trial import CAUGHT, SURVIVED, TIMED_OUT, Limit, Outcome, trial
from mutation.warm import Run, Workers

ROOT = Path(__file__).parents[2]
SOURCE = "packages/toy/src/toy.py"
TEST = "packages/toy/tests/test_toy.py"
MODULE = '''"""Sums."""


def tested(count: int | None) -> int:
    """Return count + 1."""
    return count + 1


def untested(count):
    return count + 2


def unreached(count):
    return count + 3


def forked(count):
    return count + 4


def down(count):
    while count > 0:
        count -= 1
    return count


def checked(count):
    if count < 0:
        raise ValueError(f"{count + 1}")
'''
TESTS = """
import subprocess
import sys

import preloaded
import toy


def test_started_programs_have_the_copy():
    assert subprocess.Popen.__module__ == "subprocess"
    code = "import toy; print(toy.tested(1), toy.untested(1))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split()[0] == "2"


def test_forked_programs_have_the_copy():
    server = preloaded.Preloaded(["json"])
    line = [sys.executable, "-c", "import toy; print(toy.forked(1))"]
    done = server.run(line, capture_output=True)
    server.close()
    assert done.stdout == b"5\\n", done.stderr


def test_down():
    assert toy.down(3) == 0
"""


POOL_TEST = """
from megatron_parallel.testing import WorkerPool


def test_ranks():
    with WorkerPool(2) as pool:
        assert type(pool._server).__name__ == "ReadyServer"
        assert pool.run(lambda rank: type(rank).__name__) == ["Rank", "Rank"]
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with one package that holds `MODULE`, and the tests of it."""
    root = tmp_path_factory.mktemp("repository")
    for name, text in (
        ("packages/toy/src/toy.py", MODULE),
        ("packages/toy/tests/test_toy.py", TESTS),
        ("pyproject.toml", '[tool.pytest.ini_options]\nmarkers = ["gpu", "slow"]\n'),
        (".gitignore", "kept/\n__pycache__/\n"),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    return root


@pytest.fixture(scope="module")
def planted(repository: Path) -> dict[str, Planted]:
    """Some defects by the text of their line."""
    text = (repository / SOURCE).read_text()
    wanted = {
        "return count + 1": "ReplaceBinaryOperator_Add_Sub",
        "return count + 2": "ReplaceBinaryOperator_Add_Sub",
        "return count + 3": "ReplaceBinaryOperator_Add_Sub",
        "return count + 4": "ReplaceBinaryOperator_Add_Sub",
        "count -= 1": "DropStatement",
    }
    made = {}
    for defect in defects(SOURCE, text)[0]:
        line = text.splitlines()[defect.line - 1].strip()
        if wanted.get(line) == defect.operator:
            changed = plant(defect, text)
            made[line] = Planted(defect, changed, *difference(text, changed))
    return made


def test_what_is_tested_is_caught_and_the_working_tree_is_left_alone(
    repository: Path, planted: dict[str, Planted], tmp_path: Path
) -> None:
    def state() -> dict[str, bytes]:
        paths = [path for path in repository.rglob("*") if path.is_file()]
        return {str(path): path.read_bytes() for path in paths}

    before, said = state(), []
    whole = Scratch.of(repository, tmp_path / "whole")
    copies = [whole.again(tmp_path / str(number)) for number in range(2)]
    workers = Workers(copies, slack=1.0, modules=["pytest"])
    reach = Reach(whole.folder, tmp_path / "reach.json", resume=False)
    kept = Outcomes(tmp_path / "outcomes.json", resume=False)
    every = [*planted.values()]
    try:
        reach.measure(every, [TEST], workers, said.append)
        files = {SOURCE: [TEST]}
        found = run_trials(files, every, reach, workers, Limit(6, 60), kept, said.append)
        assert checked(found, workers, said.append) == found
    finally:
        workers.close()
    assert state() == before
    outcomes = {line: found[one.defect.rank] for line, one in planted.items()}
    assert {line: outcome.result for line, outcome in outcomes.items()} == {
        "return count + 1": CAUGHT,  # by a program that a test starts
        "return count + 2": SURVIVED,
        "return count + 3": SURVIVED,
        "return count + 4": CAUGHT,  # by a fork that a test starts
        "count -= 1": TIMED_OUT,
    }
    assert outcomes["return count + 1"].by == f"{TEST}::test_started_programs_have_the_copy"
    assert outcomes["return count + 2"].tests == (f"{TEST}::test_started_programs_have_the_copy",)
    assert outcomes["return count + 4"].tests == (f"{TEST}::test_forked_programs_have_the_copy",)
    assert outcomes["return count + 3"].by == "no test reaches it"
    again = Outcomes(tmp_path / "outcomes.json", resume=True)
    assert set(again.known) == {one.defect.rank for one in planted.values()}


@pytest.mark.parametrize(
    ("without", "result"), [(Run(0, 0.1, ""), CAUGHT), (Run(-9, 0.1, ""), SURVIVED)]
)
def test_a_killed_pytest_counts_only_where_it_ends_well_without_the_defect(
    planted: dict[str, Planted], tmp_path: Path, without: Run, result: str
) -> None:
    one, copy = planted["return count + 1"], Scratch(tmp_path)
    (tmp_path / SOURCE).parent.mkdir(parents=True)
    runs = trial(copy, one, MODULE, {TEST: 0.1}, Limit(3, 1))
    next(runs)
    assert (tmp_path / SOURCE).read_text() == one.text
    runs.send(Run(-9, 0.1, ""))
    assert (tmp_path / SOURCE).read_text() == MODULE
    with pytest.raises(StopIteration) as ended:
        runs.send(without)
    assert ended.value.value.result == result


def test_worker_pools_start_from_a_waiting_server(tmp_path: Path) -> None:
    """The child replaces a private function of the pool, whose parameters may change."""
    (tmp_path / "packages/megatron-parallel").mkdir(parents=True)
    (tmp_path / "test_pool.py").write_text(POOL_TEST)
    order = {"limit": 60, "slack": 2.0, "hits": "", "pytest": ["-q", "test_pool.py"]}
    code = f"from mutation.child import main; main({order!r})"
    more = {"PYTHONPATH": str(ROOT / "tooling"), "LONG": "x" * 100_000}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | more,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_other_test_files_of_a_package_follow_those_of_an_area() -> None:
    own = targets.test_files(ROOT, "launch")
    others = targets.other_test_files(ROOT, "launch")
    folder = ROOT / "packages/megatron-train/tests"
    every = {path.relative_to(ROOT).as_posix() for path in folder.glob("test_*.py")}
    assert len(own) + len(others) == len({*own, *others}) and set(others) < every
    of_all = {f"integration_tests/test_{name}.py" for name in ("launch_terminal", "ctrl_c")}
    assert {*own, *others} - every == {*targets.EVERYWHERE, *of_all}


def test_tests_that_name_a_file_come_first_and_need_no_measurement(
    repository: Path, planted: dict[str, Planted], tmp_path: Path
) -> None:
    other = "packages/toy/tests/test_other.py"
    (repository / other).write_text("def test_nothing():\n    pass\n")
    assert naming_tests(repository, [other, TEST], SOURCE) == [TEST]
    assert naming_tests(repository, [other], SOURCE) == []
    copy = Scratch.of(repository, tmp_path / "copy")
    workers = Workers([copy], slack=1.0, modules=["pytest"])
    kept, said = Outcomes(tmp_path / "outcomes.json", resume=False), []
    every = [planted["return count + 1"], planted["return count + 2"]]
    try:
        found = run_first_trials(
            {SOURCE: [other, TEST]}, every, repository, workers, Limit(8, 60), kept, said.append
        )
    finally:
        workers.close()
        (repository / other).unlink()
    assert [outcome.result for outcome in found.values()] == [CAUGHT]  # the other is left out
    assert every[0].defect.rank in found and "later" in said[1]


def test_lines_of_functions_are_not_those_that_an_import_executes() -> None:
    lines = MODULE.splitlines()
    assert [in_function(MODULE, lines.index(line) + 1) for line in lines if "count" in line] == [
        *(False, True, True, False, True, False, True, False, True),
        *(False, True, True, True, False, True, True),
    ]


def test_defects_without_an_effect_are_left_out(repository: Path) -> None:
    found, left_out = defects(SOURCE, (repository / SOURCE).read_text())
    assert left_out == {"in an annotation": 1, "in the text of an error": 3}
    assert {"ReplaceComparisonOperator_Lt_GtE", "AddNot"} <= {one.operator for one in found}


@pytest.mark.parametrize(
    ("line", "reason", "kept"),
    [
        ("a = b[0]", "the index 0 as -1, the same element of one", {"a=b[1]"}),
        ("a = b[1]", "", {"a=b[0]", "a=b[2]"}),
        ("a = 0", "", {"a=1", "a=-1"}),
        ("a = zip(b, strict=True)", "`strict` of a `zip`, an assertion", set()),
        ("a = zip(b, strict=False)", "", {"a=zip(b,strict=True)"}),
        ("a = f(strict=True)", "", {"a=f(strict=False)"}),
        ("a = axes.bar(b * 6)", "a size or place in a picture", {"a=axes.bar(b/6)"}),
        ("a = axes.barred(6)", "", {"a=axes.barred(5)", "a=axes.barred(7)"}),
        ("""a = f'<g x="{b + 3}"/>'""", "a size or place in a picture", {"""a=f'<gx="{b-3}"/>'"""}),
        ("a = f'{b[1]} < 5'", "", {"a=f'{b[0]}<5'", "a=f'{b[2]}<5'"}),
    ],
)
def test_changes_that_no_user_notices_are_left_out(line: str, reason: str, kept: set[str]) -> None:
    found, left_out = defects("toy.py", line)
    assert [*left_out] == ([reason] if reason else [])
    made = [str(plant(one, line)).replace(" ", "") for one in found]
    assert {*made} == kept and len(made) == len(kept)


def test_inputs_of_checks_keep_their_logic() -> None:
    text = "Case(3)\nif a < 5:\n    pass"
    found, left_out = defects("src/megatron_kernels/ssm_cases.py", text)
    assert left_out == {"another input for a check or benchmark": 4}
    assert {one.operator for one in found} >= {"AddNot", "ReplaceComparisonOperator_Lt_LtE"}
    elsewhere, none = defects("src/megatron_kernels/cases_of_rows.py", text)
    assert len(elsewhere) == len(found) + 4 and not none


def test_a_plan_is_spread_and_does_not_change_with_lines_above(tmp_path: Path) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(MODULE)
    areas = {"one": ["a.py", "b.py"]}
    chosen, _, possible = plan(tmp_path, areas, 6, 1)
    assert [one.defect.source for one in chosen["one"]].count("a.py") == 3
    assert len({(one.defect.source, one.defect.line) for one in chosen["one"]}) == 6
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("# A comment.\n" + MODULE)
    again, _, same = plan(tmp_path, areas, 6, 1)
    assert same == possible
    assert [one.key for one in again["one"]] == [one.key for one in chosen["one"]]


def test_another_seed_chooses_other_lines(tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / f"{number}.py").write_text(MODULE)
    areas = {"one": [f"{number}.py" for number in range(9)]}
    draws = [plan(tmp_path, areas, 4, seed)[0]["one"] for seed in (1, 2, 1)]
    keys = [[planted.key for planted in drawn] for drawn in draws]
    assert [len(found) for found in keys] == [4, 4, 4]
    assert keys[0] == keys[2] != keys[1]


def test_every_source_file_is_in_one_area_and_every_pattern_names_a_file() -> None:
    found = [name for names in targets.sources(ROOT).values() for name in names]
    every = {p.relative_to(ROOT).as_posix() for p in ROOT.glob("packages/*/src/**/*.py")}
    assert sorted(found) == sorted(every)
    for name, area in targets.areas().items():
        for pattern in (*area.code, *area.tests):
            assert list(ROOT.glob(pattern)), f"{name}: {pattern} names no file"


def test_survivors_are_listed_with_the_reason(planted: dict[str, Planted], tmp_path: Path) -> None:
    one, two = planted["return count + 1"], planted["return count + 2"]
    rows = [(one, Outcome(CAUGHT, f"{TEST}::test_x[a|b]", (TEST,)))]
    rows.append((two, Outcome(SURVIVED, "all pass", (TEST,))))
    reasons = tmp_path / "survivors.toml"
    entry = {"source": SOURCE, "before": two.before, "after": two.after, "reason": "a toy"}
    lines = [f"{name} = {json.dumps(value)}" for name, value in entry.items()]
    reasons.write_text("\n".join(["[[survivor]]", *lines]))
    why = table.reasons(reasons)
    text = table.tables({"sums": rows}, why, Counter({"in an annotation": 1}), 9)
    assert "| sums | 1 | 2 | 1 |  |" in text and "50.0 %" in text
    assert "| `toy.py` | `return count + 2` | `count + 2` → `count - 2` | a toy |" in text
    assert (
        "| `toy.py` | `return count + 1` | `count + 1` → `count - 1` | test_toy: `test_x` |" in text
    )


def test_reasons_name_survivors_by_what_stands_in_the_code_now() -> None:
    for key in table.reasons(ROOT / "tooling/mutation/survivors.toml"):
        source, _, change = key.partition(": ")
        before = change.partition(" -> ")[0]
        text = " ".join((ROOT / source).read_text().split())
        assert " ".join(before.split()) in text, f"{key} is no longer in the code"


PROBED = '''"""Text."""

from __future__ import annotations

LIMIT = 1


class Sum:
    limit: int = 2

    def add(self, a, b=3):
        """Adds."""
        try:
            if a: return 4
            elif b:
                a = (
                    b + 5
                )
            def within():
                return 6
        except ValueError:
            raise KeyError(7)
        match a:
            case 8:
                return 9


@triton.jit
def kernel(x):
    return x + 10
'''
PLACES = {
    1: (" LIMIT = 1", False),
    2: (" class Sum:", False),
    3: (" class Sum:", False),
    4: (" if a: return 4", True),
    5: (" a = (", True),
    6: (" return 6", True),
    7: (" raise KeyError(7)", True),
    8: (" match a:", True),
    9: (" return 9", True),
    10: (" @triton.jit", False),
}


def test_probes_stand_before_the_statement_and_outside_of_what_is_compiled_from_source() -> None:
    lines = PROBED.splitlines()
    places = {n: next(i for i, line in enumerate(lines, 1) if str(n) in line) for n in PLACES}
    text = probed(PROBED, places)
    compile(text, "probed", "exec")
    rows = text.splitlines()
    assert [row for row in rows if "mutation_probe" not in row] == lines
    assert "import" in rows[lines.index("LIMIT = 1")]
    for number, (statement, inside) in PLACES.items():
        at = next(i for i, row in enumerate(rows) if f"mutation_probe({number}, {inside})" in row)
        after = next(row for row in rows[at:] if "mutation_probe" not in row)
        assert after.strip() == statement.strip(), number
        assert len(after) - len(after.lstrip()) == len(rows[at]) - len(rows[at].lstrip())


def test_stored_records_are_of_the_same_code_tests_and_defects(
    repository: Path, planted: dict[str, Planted], tmp_path: Path
) -> None:
    one, two = planted["return count + 1"], planted["return count + 2"]
    copy, stored = Scratch.of(repository, tmp_path / "copy"), tmp_path / "reach.json"
    workers = Workers([copy], slack=1.0, modules=["pytest"])
    try:
        for defects_of, said_of in (([one], 1), ([one], 0), ([one, two], 1)):
            said: list[str] = []
            reach = Reach(copy.folder, stored, resume=True)
            reach.measure(defects_of, [TEST], workers, said.append)
            assert len(said) == said_of
            assert [*reach.records[TEST]["reached"]] == [x.defect.rank for x in defects_of]
    finally:
        workers.close()
    assert not list(copy.folder.rglob("mutation_probe*"))


def test_ranks_and_fixtures_of_several_tests_reach_for_the_whole_file(tmp_path: Path) -> None:
    reach = Reach(tmp_path, tmp_path / "reach.json", resume=False)
    tests = {"t.py::a": 2.0, "t.py::b": 1.0, "t.py::c": 9.0}
    for reached, limit, wanted in (
        (["", "t.py::a"], 20, ["t.py"]),
        (["", "t.py::a"], 10, ["t.py::a"]),
        ([""], 10, ["t.py::b", "t.py::a"]),
        (["t.py::a", "t.py::c"], 20, ["t.py::a", "t.py::c"]),
        ([], 20, []),
    ):
        record = {"seconds": 12.0, "tests": tests, "reached": {"r": reached} if reached else {}}
        reach.records = {"t.py": record}
        assert [*reach.reaching(["t.py"], "r", limit)] == wanted
