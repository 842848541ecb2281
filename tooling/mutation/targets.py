"""The code that gets defects, and the tests that may catch them."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Area:
    """A part of the code.

    Attributes:
        code: Patterns of its source files.
        tests: Patterns of its test files among those of `nox -s tests`. Fewer files take less time
            and never catch more.
    """

    code: tuple[str, ...]
    tests: tuple[str, ...]


def in_package(
    name: str, code: tuple[str, ...], tests: tuple[str, ...], integration: tuple[str, ...] = ()
) -> Area:
    """Returns an area of one package; patterns are relative to its source, its tests and all
    packages'.
    """
    package = f"packages/{name}"
    source = f"{package}/src/{name.replace('-', '_')}"
    return Area(
        tuple(f"{source}/{pattern}" for pattern in code),
        (
            *(f"{package}/tests/test_{pattern}.py" for pattern in tests),
            *(f"integration_tests/{pattern}.py" for pattern in integration),
        ),
    )


_RUN = (
    *("callbacks*", "trainer*", "accounting*", "auxiliary_losses*", "loss_scaling*", "metrics*"),
    *("parts_of_a_run*", "report*", "step_time*"),
)
_GRADIENTS = ("data_parallel*", "gradient*", "parameter_buffers*", "partial_gradients*")

AREAS = {
    "trainer": in_package("megatron-train", ("trainer.py", "engine.py", "callbacks/*.py"), _RUN),
    "metrics": in_package("megatron-train", ("metrics/*.py",), _RUN),
    "samplers and orders": in_package(
        "megatron-data",
        ("samplers.py", "order/*.py"),
        (
            *("order*", "samplers*", "stateless*", "blend*", "packing*", "packed*", "elastic*"),
            *("datasets*", "mix*", "sentences*", "masked*", "sft*", "conversation_lines*"),
        ),
    ),
    "store": in_package("megatron-ckpt", ("store/*.py",), ("*",)),
    "server": in_package(
        "megatron-infer",
        ("server/*.py",),
        ("server*", "cli*"),
        integration=("test_serve/test_serve_command",),
    ),
    "tensor parallel": in_package(
        "megatron-parallel",
        ("tensor_parallel/*.py",),
        (
            *("tensor_parallel*", "cross_entropy*", "gradient_fusion*", "product*"),
            *("vocabulary_loss*", "split_backward*"),
        ),
        integration=("test_adapters",),
    ),
    "data parallel": in_package(
        "megatron-parallel",
        ("data_parallel/*.py",),
        _GRADIENTS,
        integration=("test_sharded_checkpoints",),
    ),
    "pipeline": in_package(
        "megatron-parallel",
        ("pipeline/*.py",),
        ("pipeline*", "combined*", "split_backward*", "pass_interleaving*"),
        integration=("test_gpt_stages",),
    ),
    "expert parallel": in_package(
        "megatron-parallel", ("expert_parallel/*.py",), ("expert*", "combined*")
    ),
    "context parallel": in_package("megatron-parallel", ("context_parallel/*.py",), ("context*",)),
}


def sources(root: Path) -> dict[str, list[str]]:
    """Returns the source files of every area, relative to `root`."""
    return {name: matching(root, area.code) for name, area in AREAS.items()}


def test_files(root: Path, name: str) -> list[str]:
    """Returns the test files of an area, relative to `root`."""
    return matching(root, AREAS[name].tests)


def matching(root: Path, patterns: tuple[str, ...]) -> list[str]:
    """Returns files that match, in the order of the patterns, without duplicates."""
    paths = [path for pattern in patterns for path in sorted(root.glob(pattern))]
    return list(dict.fromkeys(path.relative_to(root).as_posix() for path in paths))
