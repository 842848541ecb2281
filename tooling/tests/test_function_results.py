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
            for method in cls.body:
                if isinstance(method, ast.FunctionDef) and method.name == "forward":
                    yield from map(ast.unparse, filter(may_be_unchanged, results(method)))


def results(method: ast.FunctionDef) -> Iterator[ast.expr]:
    """Yields what a method returns: of several values each, of a variable what it was set to."""
    set_to = {
        target.id: node.value
        for node in ast.walk(method)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(method):
        if isinstance(node, ast.Return) and node.value is not None:
            several = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            yield from (set_to.get(v.id, v) if isinstance(v, ast.Name) else v for v in several)


def may_be_unchanged(value: ast.expr) -> bool:
    """Returns whether the last call of an expression is one of these methods."""
    called = value.func if isinstance(value, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr in UNCHANGED


@pytest.mark.parametrize("package", sorted(ROOT.glob("packages/*")), ids=lambda path: path.name)
def test_results_are_new_tensors_or_views(package: Path) -> None:
    for path in package.glob("src/**/*.py"):
        assert list(wrong_results(path.read_text(encoding="utf-8"))) == [], path


def test_a_wrong_result_is_found() -> None:
    code = "class F(Function):\n    def forward(ctx, x):\n        return (x * 2).to(x.dtype)\n"
    assert list(wrong_results(code)) == ["(x * 2).to(x.dtype)"]
    for other in ("y = (x * 2).to(x.dtype)\n        return y", "return x + 1, (x * 2).to(x.dtype)"):
        result = code.replace("return (x * 2).to(x.dtype)", other)
        assert list(wrong_results(result)) == ["(x * 2).to(x.dtype)"]
    assert not list(wrong_results(code.replace(".to(x.dtype)", ".view_as(x)")))
