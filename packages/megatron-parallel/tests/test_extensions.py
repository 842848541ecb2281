"""Extensions are found by name, and invalid ones are reported in one line."""

import os
import sys
from importlib import metadata
from importlib.metadata import EntryPoint

import megatron_parallel.extensions as extensions
import pytest
from megatron_parallel.extensions import Extensions
from megatron_parallel.tensor_parallel.product_kinds import ProductKind

GROUP = "some.group"
KIND = "megatron_parallel.tensor_parallel.lora_config:KIND"
SHAPES = Extensions(GROUP, "shape", KeyError, builtin={"circle": "math:tau"})


@pytest.fixture
def bring(monkeypatch):
    """Returns a function that installs entry points of this group and another one."""

    def install(**found):
        points = [EntryPoint(name, value, GROUP) for name, value in found.items()]
        monkeypatch.setattr(
            extensions, "entry_points", lambda group: points if group == GROUP else []
        )

    return install


def test_builtin_objects_and_those_of_other_distributions_are_found(bring):
    bring(angle="math:pi")
    assert list(SHAPES.entries()) == ["angle", "circle"]
    assert SHAPES.load("angle") == 3.141592653589793 and SHAPES.load("circle") > 6
    assert "angle" in SHAPES and "circle" in SHAPES and "square" not in SHAPES


def test_a_builtin_name_is_found_without_a_search(monkeypatch):
    monkeypatch.setattr(extensions, "entry_points", None)
    assert "circle" in SHAPES


def test_all_objects_are_loaded_with_one_search(monkeypatch):
    """A search reads the files of all installed distributions."""
    point, searches = EntryPoint("other", KIND, GROUP), []
    monkeypatch.setattr(extensions, "entry_points", lambda group: searches.append(group) or [point])
    products = Extensions(GROUP, "product", KeyError, builtin={"lora": KIND})
    with pytest.raises(
        KeyError, match=r"entry point 'other' of some.group is .*not a ProductKind of"
    ):
        products.load_instances(ProductKind)
    assert searches == [GROUP]
    monkeypatch.setattr(extensions, "entry_points", lambda group: searches.append(group) or [])
    assert list(products.load_instances(ProductKind)) == ["lora"]
    assert searches == [GROUP] * 2
    assert products.load_instance("lora", ProductKind).name == "lora"
    with pytest.raises(KeyError, match=r"'circle' of some\.group is math:tau, which is not a P"):
        SHAPES.load_instance("circle", ProductKind)


def test_installed_distributions_are_searched_again_only_after_a_change(tmp_path, monkeypatch):
    def install(name):
        folder = tmp_path / f"{name}-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\n")
        (folder / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = math:pi\n")

    searches, search = [], metadata.entry_points
    monkeypatch.setattr(
        metadata, "entry_points", lambda **which: searches.append(1) or search(**which)
    )
    install("square")
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(3):
        assert list(SHAPES.entries()) == ["circle", "square"]
    assert not extensions.entry_points("another.group")
    assert searches == [1], "one search finds all groups"
    install("triangle")
    os.utime(tmp_path, (1, 1))  # also where the clock of the file system is coarse
    assert list(SHAPES.entries()) == ["circle", "square", "triangle"]
    assert searches == [1, 1]
    sys.path.remove(str(tmp_path))
    assert list(SHAPES.entries()) == ["circle"]


def test_a_name_that_cannot_be_loaded_is_reported_in_one_line(bring):
    bring(angel="math:pi", broken="math:absent", gone="no_such_module:it")
    with pytest.raises(KeyError, match=r"no shape 'angle'; did you mean 'angel'\?; installed are "):
        SHAPES.find("angle")
    nothing = Extensions("another.group", "shape", KeyError)
    assert nothing.unknown_name_message("a", "flag a") == (
        "no shape flag a; installed are none; install the distribution that provides it"
    )
    for name in ("broken", "gone"):
        with pytest.raises(KeyError, match=f"the shape '{name}' is .*, which cannot be imported:"):
            SHAPES.load(name)
    bring(circle="math:pi")
    with pytest.raises(
        KeyError, match="two distributions provide the shape 'circle': math:tau and"
    ):
        SHAPES.find("circle")
    bring(circle="math:tau")  # the same object once more
    assert list(SHAPES.entries()) == ["circle"]
