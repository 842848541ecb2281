"""Every public name of megatron-parallel and megatron-data is on an API page in the navigation."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "packages/megatron-parallel/src/megatron_parallel"
PAGES = ROOT / "docs/packages/megatron-parallel"
SUB_PACKAGES = sorted(stub.parent.name for stub in SOURCES.glob("*/__init__.pyi"))


def public_names(stub: Path) -> dict[str, set[str]]:
    """Public names by the module that a stub imports them from."""
    found: dict[str, set[str]] = {}
    for module, names in re.findall(
        r"from \.([\w.]+) import ([^(\n]+|\([^)]*\))", stub.read_text()
    ):
        found.setdefault(module, set()).update(re.findall(r"(\w+) as", names))
    return found


def listed_names(page: str) -> dict[str, set[str]]:
    """Members that a page lists, by module; an empty set stands for a whole module."""
    found = {}
    for module, options in re.findall(r"^::: (\S+)\n((?:(?:    .*)?\n)*)", page, re.M):
        _, _, members = options.partition("members:")
        found[module] = set(re.findall(r"\w+", members))
    return found


@pytest.mark.parametrize("name", SUB_PACKAGES)
def test_the_page_of_a_sub_package_lists_its_public_names(name: str) -> None:
    listed = listed_names((PAGES / f"{name}.md").read_text())
    expected = {
        f"megatron_parallel.{name}.{module}": names
        for module, names in public_names(SOURCES / name / "__init__.pyi").items()
    }
    assert listed == expected
    assert f"packages/megatron-parallel/{name}.md" in (ROOT / "mkdocs.yml").read_text()


def test_names_of_everyday_use_are_public_names_of_a_sub_package_or_on_the_main_page() -> None:
    main = listed_names((ROOT / "docs/packages/megatron-parallel.md").read_text())
    for module, names in public_names(SOURCES / "__init__.pyi").items():
        package, _, rest = module.partition(".")
        if package == "_version":
            continue
        if rest:
            assert names <= public_names(SOURCES / package / "__init__.pyi")[rest], module
        elif package in SUB_PACKAGES:
            stub = public_names(SOURCES / package / "__init__.pyi")
            assert names <= set().union(*stub.values()), module
        else:
            page = f"megatron_parallel.{module}"
            assert page in main and (not main[page] or names <= main[page]), module


def test_the_door_shows_few_names() -> None:
    assert 20 < sum(map(len, public_names(SOURCES / "__init__.pyi").values())) < 40


DATA_SOURCES = ROOT / "packages/megatron-data/src/megatron_data"
DATA_PACKAGES = sorted(stub.parent.name for stub in DATA_SOURCES.glob("*/__init__.pyi"))


@pytest.mark.parametrize("name", DATA_PACKAGES)
def test_the_page_of_a_sub_package_of_megatron_data_has_its_public_names(name: str) -> None:
    """Pages may list whole modules, and modules that are not in the stub."""
    page = ROOT / f"docs/packages/megatron-data/{name}.md"
    listed = listed_names(page.read_text() + "\n")
    for module, names in public_names(DATA_SOURCES / name / "__init__.pyi").items():
        members = listed.get(f"megatron_data.{name}.{module}")
        assert members is not None, f"{page.name} does not list {module}"
        assert not members or names <= members, module
    assert f"packages/megatron-data/{name}.md" in (ROOT / "mkdocs.yml").read_text()
