"""Imports and public names of the package."""

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import megatron_data
import pytest

DOORS = ("datasets", "indexed", "order", "preprocessing", "sources", "tokenizers")
SOURCE = Path(megatron_data.__file__).parent

SCRIPT = """
import importlib, sys
import megatron_data
assert "numpy" not in sys.modules, "importing the package is not free"
from megatron_data import ByteTokenizer, build_gpt_datasets, preprocess
made, = preprocess([sys.argv[1]], sys.argv[2], ByteTokenizer(), append_eod=True)
train = build_gpt_datasets(made.prefix, "90,10", (20, 0, 0), 32, eod_id=256).train
train[0]
for door in ("", ".datasets", ".indexed", ".order", ".preprocessing", ".sources", ".tokenizers"):
    module = importlib.import_module(f"megatron_data{door}")
    for name in module.__all__:
        getattr(module, name)
from megatron_data.cli import main
assert main(["inspect", made.prefix]) == 0
for name in ("torch", "nltk", "transformers", "tensorflow"):
    assert name not in sys.modules, name
"""


def test_neither_torch_nor_nltk_is_imported(corpus: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(corpus), str(tmp_path / "o")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_one_module_imports_torch_one_nltk_and_none_a_sibling_package() -> None:
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for name in names:
                root = name.split(".")[0]
                assert root != "nltk" or path.stem == "nltk_sentences", path
                assert root != "torch" or path == SOURCE / "torch.py", path
                assert root == "megatron_data" or not root.startswith("megatron"), path


@pytest.mark.parametrize("door", ["", *DOORS])
def test_public_names_exist_and_have_docstrings(door: str) -> None:
    module = importlib.import_module(f"megatron_data.{door}".rstrip("."))
    assert module.__all__
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isroutine(value):  # not an alias of types
            assert value.__doc__, name


def test_the_top_level_repeats_names_of_the_sub_packages() -> None:
    """Every name at the top is public in a sub-package or a public module, and is the same."""
    top = set(megatron_data.__all__) - {"__version__"}
    assert len(top) <= 35
    for door in (*DOORS, "errors", "samplers"):
        module = importlib.import_module(f"megatron_data.{door}")
        for name in top & set(dir(module)):
            assert getattr(module, name) is getattr(megatron_data, name)
            top.remove(name)
    assert not top
