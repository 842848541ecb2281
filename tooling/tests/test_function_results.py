"""No forward pass of an autograd function returns what may be an unchanged intermediate tensor.

torch 2.11 compiles such a function without gradients:
findings/compiled-function-unchanged-result.sh.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UNCHANGED = {"to", "type_as", "contiguous", "float", "double", "half", "bfloat16", "flatten"}
"""Methods that return their tensor if there is nothing to do."""


def wrong_results(code: str) -> Iterator[str]:
    """Yields the results of forward passes that end with one of these methods."""
    for cls in ast.walk(ast.parse(code)):
        if isinstance(cls, ast.ClassDef) and any("Function" in ast.unparse(b) for b in cls.bases):
            for result in ast.walk(cls):
                if isinstance(result, ast.FunctionDef) and result.name == "forward":
                    returns = [r.value for r in ast.walk(result) if isinstance(r, ast.Return)]
                    yield from (
                        ast.unparse(value)
                        for value in returns
                        if isinstance(value, ast.Call)
                        and isinstance(value.func, ast.Attribute)
                        and value.func.attr in UNCHANGED
                    )


@pytest.mark.parametrize("package", sorted(ROOT.glob("packages/*")), ids=lambda path: path.name)
def test_results_are_new_tensors_or_views(package: Path) -> None:
    for path in package.glob("src/**/*.py"):
        assert list(wrong_results(path.read_text(encoding="utf-8"))) == [], path


def test_a_wrong_result_is_found() -> None:
    code = "class F(Function):\n    def forward(ctx, x):\n        return (x * 2).to(x.dtype)\n"
    assert list(wrong_results(code)) == ["(x * 2).to(x.dtype)"]
    assert not list(wrong_results(code.replace(".to(x.dtype)", ".view_as(x)")))
