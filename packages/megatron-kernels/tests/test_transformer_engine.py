"""Transformer Engine with a plain replacement: norms, products in every recipe, versions, names."""

import ast
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_transformer_engine
import pytest
import torch
from megatron_kernels import KernelError, layer_norm, linear, rms_norm
from megatron_kernels.availability import library, probe_installation
from megatron_kernels.cli import main
from megatron_kernels.transformer_engine import (
    TransformerEngineRecipe,
    is_quantized,
    norm,
    products,
    te_dgrad,
    te_forward,
    te_gather,
    te_quantized_norm,
    te_unsupported_reason,
    te_wgrad,
)
from megatron_kernels.transformer_engine.check import SCALINGS, check_recipes
from torch import Tensor

ERRORS = {"delayed": 0.05, "tensorwise": 0.05, "blockwise": 0.05, "mxfp8": 0.05, "nvfp4": 0.2}
"""Largest error of a product of 32 or more numbers, relative to its root mean square."""


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_transformer_engine.install(monkeypatch)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def compared(adapter: Callable[..., Tensor], truth: Callable[..., Tensor], *arguments: Any) -> None:
    """Compares values and gradients with those in float64."""
    leaves = [a for a in arguments if isinstance(a, Tensor)]
    exact = [
        a.detach().double().requires_grad_() if isinstance(a, Tensor) else a for a in arguments
    ]
    found, expected = adapter(*arguments), truth(*exact)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    weights = torch.linspace(0.5, 1.5, found.numel()).view(found.shape)
    for one, other in zip(
        torch.autograd.grad(found, leaves, weights),
        torch.autograd.grad(
            expected, [a for a in exact if isinstance(a, Tensor)], weights.double()
        ),
        strict=True,
    ):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_norms_equal_the_reference(zero_centered: bool) -> None:
    x, gain, shift = drawn(5, 3, 16), drawn(16), drawn(16)
    compared(
        lambda *a: norm.layer_norm(*a, 1e-5, zero_centered),
        lambda *a: layer_norm(*a, 1e-5, zero_centered, backend="reference"),
        *(x, gain, shift),
    )
    for plain, given in ((norm.layer_norm, (gain, shift)), (norm.rms_norm, (gain,))):
        by_default = plain(x, *given, 1e-5)  # a gain that is not centered at zero
        assert torch.equal(by_default, plain(x, *given, 1e-5, zero_centered)) != zero_centered
    for values in (x, drawn(3, 16, 5).transpose(1, 2)):
        compared(
            lambda *a: norm.rms_norm(*a, 1e-5, zero_centered),
            lambda *a: rms_norm(*a, 1e-5, zero_centered, backend="reference"),
            *(values, gain),
        )


@pytest.mark.parametrize("bias", [True, False])
def test_the_linear_layer_equals_the_reference(bias: bool) -> None:
    shift = drawn(7) if bias else None
    compared(
        products.linear,
        lambda *a: linear(*a, backend="reference"),
        *(drawn(5, 3, 16), drawn(7, 16), shift),
    )


def operands(recipe: TransformerEngineRecipe, *tensors: tuple[Any, Tensor]) -> Iterator[Tensor]:
    for operand, x in tensors:
        amax = torch.zeros(1)
        scale = recipe.largest(operand) / x.detach().abs().amax()[None] if operand else None
        make: Any = {"rows": True, "columns": True, "scale": scale, "amax": amax}
        yield recipe.quantizer(operand, x.device, **make)(x)
        if recipe.scaling == "delayed":
            assert amax == x.abs().amax()


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("scaling", ERRORS)
def test_products_of_quantized_operands_are_near_those_in_float64(scaling: Any, wide: bool) -> None:
    recipe = TransformerEngineRecipe(scaling, wide and scaling != "nvfp4")
    x, weight, dy = drawn(4, 16, 96), drawn(32, 96), drawn(64, 32)
    named = ("input", x), ("weight", weight), ("gradient", dy)
    few_x, few_weight, few_dy = operands(recipe, *named)
    assert is_quantized(few_x) and not is_quantized(x) and few_x.dtype == x.dtype
    into, fresh = torch.ones(32, 96), torch.ones(32, 96)
    exact = recipe.sums_exactly_forward
    rows, precise = x.double().view(64, 96), dy.double()
    for found, expected in (
        (te_forward(few_x, few_weight, exact=exact), x.double() @ weight.double().t()),
        (te_dgrad(few_dy, few_weight), precise @ weight.double()),
        (te_wgrad(few_dy, few_x), precise.t() @ rows),
        (te_wgrad(few_dy, few_x, into, first=False), precise.t() @ rows + 1),
        (te_wgrad(few_dy, few_x, fresh, first=True), precise.t() @ rows),
    ):
        expected = expected.detach()
        error = (found - expected).norm() / expected.norm()
        assert found.shape == expected.shape and 1e-4 < error < (2 * ERRORS[scaling]), error
    assert te_wgrad(few_dy, few_x, into) is into


def test_weights_have_blocks_of_two_dims_and_fp4_is_spread_in_gradients_alone() -> None:
    def options(scaling: Any, operand: Any) -> Any:
        made = TransformerEngineRecipe(scaling).quantizer(
            operand, torch.device("cpu"), rows=False, columns=True
        )
        assert made.columnwise_usage and made.rowwise_usage  # kernels make columns with rows
        return made.dims if scaling == "blockwise" else made.options

    few = TransformerEngineRecipe("mxfp8")
    assert not few.quantizer("input", torch.device("cpu"), rows=False, columns=True).rowwise_usage
    names = "input", "weight", "gradient"
    assert [options("blockwise", name) for name in names] == [1, 2, 1]
    spread = [(True, False, False), (False, True, False), (True, False, True)]
    assert [options("nvfp4", name) for name in names] == spread
    nearest = [(False, False, False), (False, True, False), (False, False, False)]
    assert [options("nvfp4-nearest", name) for name in names] == nearest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_in_few_bits_adds_a_bias_in_its_dtype(dtype: torch.dtype) -> None:
    recipe = TransformerEngineRecipe("mxfp8")
    named = ("input", drawn(32, 64, dtype=dtype)), ("weight", drawn(32, 64, dtype=dtype))
    x, weight = operands(recipe, *named)
    bias = drawn(32, dtype=dtype).detach()
    found = te_forward(x, weight, bias)
    assert found.dtype == dtype
    error = 1e-2 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(found, te_forward(x, weight) + bias, rtol=error, atol=error)


@pytest.mark.parametrize("rms", [True, False])
def test_a_norm_writes_the_quantized_input_and_has_the_gradient_of_a_norm(rms: bool) -> None:
    recipe = TransformerEngineRecipe("tensorwise")
    x, gain, shift = drawn(4, 16, 32), drawn(32), None if rms else drawn(32)
    quantizer = recipe.quantizer("input", x.device, rows=True, columns=False)
    y = te_quantized_norm(x, gain, shift, 1e-5, True, quantizer)
    assert is_quantized(y) and y.shape == x.shape and y.requires_grad
    plain = norm.rms_norm(x, gain, 1e-5, True)
    if shift is not None:
        plain = norm.layer_norm(x, gain, shift, 1e-5, True)
    assert torch.equal(y.detach().rowwise, quantizer.rounded(plain.detach().double()))
    leaves = [x, gain] if shift is None else [x, gain, shift]
    dy = drawn(4, 16, 32).detach()
    for one, other in zip(
        torch.autograd.grad(y, leaves, dy), torch.autograd.grad(plain, leaves, dy), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("scaling", "rows", "columns"),
    [
        ("delayed", 8, 16),  # as `assert_dim_for_fp8_exec` of Transformer Engine asks for
        ("tensorwise", 8, 16),
        ("blockwise", 8, 16),
        ("mxfp8", 32, 32),
        ("nvfp4", 16, 16),
        ("nvfp4-nearest", 16, 16),
    ],
)
def test_operands_have_multiples_of_rows_and_columns(scaling: Any, rows: int, columns: int) -> None:
    reason = TransformerEngineRecipe(scaling).shape_reason
    assert reason(rows, columns) is None and reason(3 * rows, 5 * columns) is None
    for wrong in ((rows, columns // 2), (rows // 2, columns), (rows + 1, columns + 1)):
        assert f"multiple of {rows} and columns of a multiple of {columns}" in str(reason(*wrong))


def test_numbers_of_8_bits_end_at_those_of_their_format() -> None:
    for scaling, wide, operand, largest in (
        ("delayed", False, "gradient", 448.0),
        ("delayed", True, "gradient", 57344.0),
        ("delayed", True, "input", 448.0),
        ("mxfp8", True, "weight", 448.0),
    ):
        recipe = TransformerEngineRecipe(scaling, wide)  # type: ignore[arg-type]
        assert recipe.largest(operand) == largest  # type: ignore[arg-type]
        made: Any = recipe.quantizer(
            operand,  # type: ignore[arg-type]
            torch.device("cpu"),
            rows=True,
            columns=False,
            scale=torch.ones(1),
            amax=torch.ones(1),
        )
        assert made.dtype == ("e5m2" if largest > 448 else "e4m3") and not made.columnwise_usage
    assert TransformerEngineRecipe("delayed") == TransformerEngineRecipe("delayed", False)


def test_scales_of_whole_tensors_and_exact_sums_belong_to_some_recipes() -> None:
    for scaling in SCALINGS:
        recipe = TransformerEngineRecipe(scaling)
        assert recipe.scales_tensors == (scaling in ("delayed", "tensorwise"))
        assert recipe.sums_exactly_forward == (scaling == "blockwise")


def test_one_scale_is_a_power_of_two_of_this_rank_or_of_a_group() -> None:
    recipe = TransformerEngineRecipe("tensorwise")
    make: Any = {"rows": True, "columns": True}
    made = recipe.quantizer("input", torch.device("cpu"), **make)
    assert made.powers and made.group is None
    assert recipe.quantizer("input", torch.device("cpu"), group="some", **make).group == "some"


def test_a_gather_is_started_and_returned_with_its_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformer_engine.pytorch.distributed as distributed

    calls: list[Any] = []

    def started(*args: Any, **options: Any) -> Any:
        calls.append((args, options))
        return "gathered", "handle"

    monkeypatch.setattr(distributed, "gather_along_first_dim", started)
    assert te_gather("tensor", "group") == ("gathered", "handle")
    assert calls == [(("tensor", "group"), {"async_op": True})]  # others compute meanwhile


def test_products_of_recipes_are_judged_by_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [each.unsupported_reason for each in check_recipes(torch.device("cpu"))] == (
        ["needs a CUDA tensor, x is on cpu"] * len(SCALINGS)
    )
    fake_transformer_engine.install(monkeypatch, on_cpu=True)
    for each in check_recipes(torch.device("cpu")):
        low, high = (0.1, 0.2) if "nvfp4" in each.scaling else (0.02, 0.05)
        assert each.passed and all(low < error < high for error in each.errors[:3]), each
        # The sum with a matrix of 16 has the error of the product, in a larger number.
        assert 0 < each.errors[3] < each.errors[2]
    import transformer_engine.pytorch.cpp_extensions as extensions

    right = fake_transformer_engine.general_gemm
    for factor, passing in ((1.05, [True] * 6), (1.12, [False] * 4 + [True] * 2)):

        def larger(*args: Any, factor: float = factor, **options: Any) -> Any:
            product, *rest = right(*args, **options)
            return product * factor, *rest

        monkeypatch.setattr(extensions, "general_gemm", larger)
        assert [each.passed for each in check_recipes(torch.device("cpu"))] == passing


def test_shapes_that_cannot_be_quantized_have_a_reason() -> None:
    assert TransformerEngineRecipe("tensorwise").shape_reason(8, 16) is None
    reason = TransformerEngineRecipe("mxfp8").shape_reason(48, 64)
    assert reason == (
        "mxfp8 needs rows of a multiple of 32 and columns of a multiple of 32, got 48 x 64"
    )


def test_a_recipe_that_the_device_lacks_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TransformerEngineRecipe("mxfp8").unavailable_reason() is None
    import transformer_engine.pytorch as te

    def question(return_reason: bool = False) -> Any:
        assert return_reason
        return False, "Device compute capability 10.0 or higher required."

    monkeypatch.setattr(te, "is_mxfp8_available", question)
    assert TransformerEngineRecipe("mxfp8").unavailable_reason() == (
        "mxfp8 is not supported: Device compute capability 10.0 or higher required"
    )


def test_calls_are_refused_with_a_reason() -> None:
    x, gain = drawn(5, 16), drawn(16)
    assert norm.layer_norm_unsupported_reason(x, gain, None, 1e-5) == "needs a bias"
    assert norm.rms_norm_unsupported_reason(x, None, 1e-5) == "needs a gain"
    reason = products.linear_unsupported_reason(x, drawn(7, 16), None)
    assert reason == "needs a CUDA tensor, x is on cpu"
    with pytest.raises(KernelError, match="needs a CUDA tensor, x is on cpu"):
        linear(x, drawn(7, 16), backend="transformer_engine")


def test_calls_are_refused_for_their_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_transformer_engine.install(monkeypatch, on_cpu=True)
    x = drawn(5, 16)
    assert te_unsupported_reason(x) is None
    assert "got torch.float64" in str(te_unsupported_reason(x.double()))
    assert "got torch.bfloat16, torch.float32" in str(te_unsupported_reason(x, x.bfloat16()))


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("2.9.0", "too old, 2.10 or newer is needed"),
        ("2.10.0", None),
        ("2.20.2", None),
        ("2.21.0", "of an unknown interface, a version below 2.21 is needed"),
    ],
)
def test_versions_with_another_interface_are_refused(
    version: str, reason: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.delitem(__import__("sys").modules, module)
    folder = tmp_path / "transformer_engine" / "pytorch"
    folder.mkdir(parents=True)
    for each in (folder, folder.parent):
        (each / "__init__.py").write_text("")
    info = tmp_path / f"transformer_engine-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: transformer-engine\nVersion: {version}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = probe_installation(library("transformer-engine"))
    assert (found.version, found.reason) == (version, reason)


SIGNATURES: dict[str, list[dict[str, str]]] = json.loads(
    (Path(__file__).parent / "transformer_engine_signatures.json").read_text()
)
"""Parameters of the published names, by version."""


def parameters(signature: str) -> ast.arguments:
    """Returns the parameters that a signature of the table states."""
    function = ast.parse(f"def f{signature}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    return function.args


def replacement(name: str) -> Any:
    """Returns what stands for a published name in the replacement."""
    found: Any = fake_transformer_engine
    last = name.removeprefix("transformer_engine_torch.").removeprefix(
        "transformer_engine.pytorch."
    )
    if last.startswith("is_"):
        return found.available
    for part in last.removeprefix("cpp_extensions.").removeprefix("distributed.").split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_replacement_takes_no_argument_that_a_version_lacks(name: str) -> None:
    """So every call that it accepts is one that all these versions accept."""
    own = [
        each
        for each in inspect.signature(replacement(name)).parameters.values()
        if each.name != "self"
    ]
    places = [each.name for each in own if each.kind is not each.KEYWORD_ONLY]
    for row in SIGNATURES[name]:
        published = parameters(row["signature"])
        order = [each.arg for each in published.args]
        assert {each.name for each in own} <= {*order, *(a.arg for a in published.kwonlyargs)}
        needed = order[: len(order) - len(published.defaults)]
        assert places[: len(needed)] == needed, row
        if "NVFP4" not in name:  # whose later versions have more before the last
            assert places == order[: len(places)], row


def test_the_command_checks_recipes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ["check", "linear", "--dtype", "float64", "--inputs", "small"]
    assert main(line) == 0
    skipped = (
        "  products in few bits (delayed), transformer_engine: needs a CUDA tensor, x is on cpu"
    )
    assert skipped in capsys.readouterr().out
    fake_transformer_engine.install(monkeypatch, on_cpu=True)
    assert main(line) == 0
    out = capsys.readouterr().out
    assert out.count("  products in few bits (") == 6 and "FAILED" not in out
    import transformer_engine.pytorch.cpp_extensions as extensions

    def wrong(*args: Any, **options: Any) -> Any:  # adds up without what was there
        return fake_transformer_engine.general_gemm(*args, **{**options, "accumulate": False})

    monkeypatch.setattr(extensions, "general_gemm", wrong)
    assert main(line) == 1
    assert capsys.readouterr().out.count("FAILED") == 6


def test_products_add_in_fp32_backward_and_forward_on_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import transformer_engine.pytorch.cpp_extensions as extensions

    seen: list[bool] = []

    def noted(*args: Any, **options: Any) -> Any:
        seen.append(options["use_split_accumulator"])
        return fake_transformer_engine.general_gemm(*args, **options)

    monkeypatch.setattr(extensions, "general_gemm", noted)
    x, weight = drawn(5, 16), drawn(7, 16)
    te_forward(x, weight)
    te_forward(x, weight, exact=True)
    products.linear(x, weight, None).sum().backward()
    assert seen == [False, True, False, True, True]


def test_operands_of_the_check_have_shapes_that_every_recipe_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_transformer_engine.install(monkeypatch, on_cpu=True)
    make, checked = TransformerEngineRecipe.quantizer, []

    def quantizer(recipe: TransformerEngineRecipe, *given: Any, **options: Any) -> Any:
        cast = make(recipe, *given, **options)

        def checks(x: Tensor) -> Tensor:
            checked.extend((recipe.shape_reason(*x.shape), recipe.shape_reason(*x.t().shape)))
            return cast(x)

        return checks

    monkeypatch.setattr(TransformerEngineRecipe, "quantizer", quantizer)
    assert all(each.passed for each in check_recipes(torch.device("cpu")))
    assert checked == [None] * (2 * 3 * len(SCALINGS))  # rows and columns of three operands
