"""Tests of Adam's Triton kernel in Triton's interpreter; `test_triton_adam.py` runs them.

Triton reads TRITON_INTERPRET when it is imported, so these tests need a process of their own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from megatron_optim import UnreadStep
from megatron_optim.adam_kernel import launch
from megatron_optim.address_tables import ALIGNED, CHUNK, FORMS, Tables
from megatron_optim.triton_adam import TritonAdam
from torch import Tensor

pytestmark = pytest.mark.sampled(2)

LR, BETAS, EPS, DECAY = 1e-2, (0.8, 0.95), 1e-6, 0.1
SHAPES = ((7, 5), (0, 3), (), (1024,), (CHUNK,), (3, CHUNK + 341), (1023,))
HALF = (torch.bfloat16, torch.float16)
ROUNDS = (None, *HALF, torch.bfloat16, torch.bfloat16, torch.float16, torch.bfloat16)
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def tensors(seed: int, shapes: Sequence[Sequence[int]] = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@dataclass
class State:
    """Parameters with their moments, and what they are rounded into."""

    parameters: list[Tensor] = field(default_factory=lambda: tensors(0))
    rounds: Sequence[torch.dtype | None] = ROUNDS
    kernel: TritonAdam = field(default_factory=TritonAdam.load)

    def __post_init__(self) -> None:
        self.means, self.squares = ([torch.zeros_like(p) for p in self.parameters] for _ in "12")
        self.rounded = [
            None if dtype is None else torch.full_like(p, 77.0, dtype=dtype)
            for p, dtype in zip(self.parameters, self.rounds, strict=True)
        ]

    def step(
        self, gradients: Sequence[Tensor], number: float, skip: float = 0.0, **given: Any
    ) -> None:
        divisor = given.pop("divisor", None)
        settings = {"lr": LR, "betas": BETAS, "eps": EPS, "decoupled": True, "weight_decay": DECAY}
        step = UnreadStep(torch.tensor(number), torch.tensor(skip), divisor, self.rounded)
        values = [gradients, self.parameters, self.means, self.squares]
        self.kernel.update_unread(values, step=step, **{**settings, **given})

    def bits(self) -> list[Tensor]:
        values = [*self.parameters, *self.means, *self.squares, *filter(_is_given, self.rounded)]
        return [value.view(BITS[value.dtype]).clone() for value in values]


def _is_given(tensor: Tensor | None) -> bool:
    return tensor is not None


def truth(steps: int, dtype: torch.dtype, decoupled: bool, **given: Any) -> list[Tensor]:
    """Returns parameters after steps of torch's optimizer, in a dtype."""
    parameters = [torch.nn.Parameter(tensor.to(dtype)) for tensor in tensors(0)]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    settings = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, **given}
    optimizer = kind(parameters, fused=dtype == torch.float32, **settings)
    for number in range(1, steps + 1):
        for parameter, gradient in zip(parameters, tensors(number), strict=True):
            parameter.grad = gradient.to(dtype)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def largest(ones: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    pairs = zip(ones, others, strict=True)
    return max(float((a.double() - b).abs().max()) for a, b in pairs if a.numel())


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("betas", [BETAS, (0.9, 0.999), (0.0, 0.3)], ids=str)
def test_steps_equal_torch_in_float64_as_closely_as_torchs_fused_kernel(
    betas: tuple[float, float], decoupled: bool
) -> None:
    state, steps = State(), 5
    for number in range(1, steps + 1):
        divisor = torch.tensor(3.0) if number % 2 else None
        gradients = [g * 3.0 if number % 2 else g for g in tensors(number)]
        state.step(gradients, number, divisor=divisor, betas=betas, decoupled=decoupled)
    exact = truth(steps, torch.float64, decoupled, betas=betas)
    fused = truth(steps, torch.float32, decoupled, betas=betas)
    error = largest(state.parameters, exact)
    assert 0.0 < error < 2.0 * largest(fused, exact)
    for parameter, rounded in zip(state.parameters, state.rounded, strict=True):
        assert rounded is None or torch.equal(rounded, torch.empty_like(rounded).copy_(parameter))


@pytest.mark.parametrize("number", [1, 10, 1000, 200_000])
def test_bias_corrections_are_those_of_float64(number: int) -> None:
    """The parameter moves by ``lr * mean / correction1 / sqrt(square / correction2)``."""
    betas, mean, square = (0.9, 0.999), 0.5, 0.04
    state = State([torch.zeros(8)], [None])
    state.means[0].fill_(mean)
    state.squares[0].fill_(square)
    state.step([torch.full((8,), 0.2)], number, lr=1.0, betas=betas, eps=0.0, weight_decay=0.0)
    mean, square = (0.9 * mean + 0.1 * 0.2), (0.999 * square + 0.001 * 0.04)
    corrected = math.sqrt(square / (1 - 0.999**number))
    wanted = -mean / (1 - 0.9**number) / corrected
    torch.testing.assert_close(state.parameters[0], torch.full((8,), wanted), rtol=3e-7, atol=0.0)


def test_a_kernel_without_bias_corrections_is_found() -> None:
    def broken(*tables: Any, logarithms: Sequence[float], **given: Any) -> None:
        launch(*tables, logarithms=[-math.inf for _ in logarithms], **given)

    state = State(kernel=TritonAdam(broken))
    state.step(tensors(1), 1.0)
    assert largest(state.parameters, truth(1, torch.float64, True)) > 1e-3


@pytest.mark.parametrize("dtype", HALF)
def test_every_number_is_rounded_as_torch_rounds_it(dtype: torch.dtype) -> None:
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    low = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    numbers = (high[:, None] | low.int()).view(torch.float32).flatten()
    state = State([numbers.clone()], [dtype])
    state.step([torch.zeros_like(numbers)], 1.0, lr=0.0, decoupled=False, weight_decay=0.0)
    parameter, rounded = state.parameters[0], state.rounded[0]
    finite = numbers.isfinite()
    assert torch.equal(parameter[finite], numbers[finite])  # infinity times no decay is NaN
    wanted, number = parameter.to(dtype), ~parameter.isnan()
    assert rounded is not None and bool(rounded[~number].isnan().all())
    assert torch.equal(rounded.view(torch.int16)[number], wanted.view(torch.int16)[number])


def test_a_step_that_is_skipped_changes_no_bit() -> None:
    state = State()
    state.step(tensors(1), 1.0)
    before = state.bits()
    gradients = [torch.full_like(p, math.nan) for p in state.parameters]
    state.step(gradients, 2.0, skip=1.0, divisor=torch.tensor(math.nan))
    assert all(map(torch.equal, before, state.bits()))


def test_a_square_that_overflows_stays_infinite() -> None:
    """As in torch: the parameter no longer moves, instead of becoming NaN."""
    for betas in (BETAS, (0.8, 0.3)):
        state = State([torch.ones(3)], [None])
        for number in (1.0, 2.0):
            state.step([torch.full((3,), 1e30)], number, betas=betas, weight_decay=0.0)
        assert bool(state.squares[0].isinf().all())
        assert torch.equal(state.parameters[0], torch.ones(3))


def test_the_host_may_decide() -> None:
    state = State(rounds=[None] * len(SHAPES))
    settings = {"lr": LR, "betas": BETAS, "eps": EPS, "decoupled": True, "weight_decay": DECAY}
    for number in (1, 2, 3):
        values = [tensors(number), state.parameters, state.means, state.squares]
        state.kernel.update(values, step=number, **settings)  # type: ignore[arg-type]
    assert largest(state.parameters, truth(3, torch.float64, True)) < 2e-6
    state.kernel.update([[]] * 4, step=1, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gradients", "parameters", "means", "squares", "rounded"])
def test_tensors_at_unaligned_addresses_are_updated_and_their_neighbors_are_not(name: str) -> None:
    """A shard may begin at any element of a buffer, and end before the next one."""
    size = 2 * 1024 + 3
    state, plain = (State([torch.ones(size)], [torch.bfloat16]) for _ in "12")
    gradients = tensors(1, [(size,)])
    plain.step(gradients, 1.0)
    lists = {"gradients": gradients, **vars(state)}
    buffer = torch.full((size + 2,), 5.0, dtype=lists[name][0].dtype)
    lists[name][0] = buffer[1:-1].copy_(lists[name][0])
    state.step(gradients, 1.0)
    assert all(map(torch.equal, plain.bits(), state.bits()))
    assert buffer[0] == buffer[-1] == 5.0


def test_offsets_beyond_two_to_the_31_are_right() -> None:
    """The tensors begin far before the memory that they have here, at the last of their chunks."""
    number, size = 2**31 // CHUNK + 3, 1500
    start = number * CHUNK
    assert start > 2**31
    state, plain = (State([torch.ones(size)], [torch.bfloat16]) for _ in "12")
    gradients = tensors(1, [(size,)])
    plain.step(gradients, 1.0)
    lists = (gradients, state.parameters, state.means, state.squares, state.rounded)
    addresses = [each[0].data_ptr() - start * each[0].element_size() for each in lists]  # type: ignore[union-attr]
    row = [*addresses, start + size, FORMS[torch.bfloat16] + ALIGNED]
    tables = Tables(torch.tensor([row]), torch.tensor([[0, number]], dtype=torch.int32))
    launch(
        tables,
        torch.tensor(1.0),
        torch.tensor(0.0),
        None,
        lr=LR,
        decay=LR * DECAY,
        eps=EPS,
        betas=BETAS,
        logarithms=[math.log(beta) for beta in BETAS],
        decoupled=True,
        dtypes={torch.bfloat16},
    )
    assert all(map(torch.equal, plain.bits(), state.bits()))


@pytest.mark.parametrize("change", ["address", "strides"])
def test_gradients_may_have_other_addresses_and_strides_in_each_step(change: str) -> None:
    state, plain = State(), State()
    for number in (1, 2, 3):
        gradients = tensors(number)
        plain.step(gradients, number)
        if change == "strides":
            gradients = [g.mT.contiguous().mT if g.dim() > 1 else g for g in gradients]
        state.step(gradients, number)
        kept = gradients  # so that the next ones have other addresses
    assert all(map(torch.equal, plain.bits(), state.bits())) and kept


def test_changed_tensors_have_new_versions() -> None:
    state = State()
    changed: list[Any] = [*state.parameters, *state.means, *filter(_is_given, state.rounded)]
    before = [tensor._version for tensor in changed]
    state.step(tensors(1), 1.0)
    assert all(tensor._version > old for tensor, old in zip(changed, before, strict=True))


def test_groups_without_elements_launch_nothing() -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the kernel was launched")

    state = State([torch.zeros(0, 3)], [None], TritonAdam(refuse))
    state.step([torch.zeros(0, 3)], 1.0)
