"""Two passes that alternate in a fixed order. An error in either ends both."""

import threading
from collections.abc import Callable

import pytest
import torch
from megatron_parallel.pipeline import PassInterleaver
from torch import Tensor


def passes(
    interleaver: PassInterleaver, log: list[str], counts: dict[str, int]
) -> list[Callable[[], str]]:
    def of(name: str) -> Callable[[], str]:
        def run() -> str:
            for i in range(counts[name]):
                log.append(f"{name}{i}")
                interleaver.switch()
            log.append(f"{name} ends")
            return name

        return run

    return [of(name) for name in counts]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({"B": 2, "F": 2}, "B0 F0 B1 F1 B ends F ends"),
        ({"B": 1, "F": 3}, "B0 F0 B ends F1 F2 F ends"),
        ({"B": 3, "F": 0}, "B0 F ends B1 B2 B ends"),
        ({"B": 0, "F": 1}, "B ends F0 F ends"),
    ],
)
def test_passes_alternate_until_one_has_ended(counts: dict[str, int], expected: str) -> None:
    interleaver = PassInterleaver()
    for _ in range(20):  # at any speed of the threads
        log: list[str] = []
        first, second = passes(interleaver, log, counts)
        assert interleaver.run_pair(first, second) == "F"
        assert " ".join(log) == expected


def test_switch_does_nothing_without_a_pair() -> None:
    interleaver = PassInterleaver()
    interleaver.switch()
    log: list[str] = []
    interleaver.run_pair(*passes(interleaver, log, {"B": 1, "F": 1}))
    interleaver.switch()


class Switch(torch.autograd.Function):
    """Switches passes in forward and backward."""

    @staticmethod
    def forward(ctx, x: Tensor, interleaver: PassInterleaver, log: list[str], name: str) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.interleaver, ctx.log, ctx.name = interleaver, log, name
        log.append(f"F{name}")
        interleaver.switch()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[no-untyped-def]
        ctx.log.append(f"B{ctx.name}")
        ctx.interleaver.switch()
        return grads[0], None, None, None


def test_passes_switch_inside_autograd() -> None:
    interleaver, log = PassInterleaver(), list[str]()
    x = torch.ones(2, requires_grad=True)

    def forward(name: str) -> Tensor:
        y = Switch.apply(x, interleaver, log, f"{name}.0")  # type: ignore[no-untyped-call]
        return Switch.apply(2 * y, interleaver, log, f"{name}.1").sum()  # type: ignore[no-untyped-call]

    one = forward("a")
    other = interleaver.run_pair(one.backward, lambda: forward("b"))
    assert log == ["Fa.0", "Fa.1", "Ba.1", "Fb.0", "Ba.0", "Fb.1"]
    assert other.requires_grad and x.grad is not None
    other.backward()  # type: ignore[no-untyped-call]
    assert (x.grad == 4).all()


@pytest.mark.parametrize("failing", ["B", "F"])
@pytest.mark.parametrize("handed_over", [0, 2])
def test_an_error_in_either_pass_ends_both(failing: str, handed_over: int) -> None:
    interleaver, ended = PassInterleaver(), list[str]()
    before = threading.active_count()

    def run(name: str) -> None:
        try:
            for i in range(9):
                if name == failing and i == handed_over:
                    raise ValueError(f"{name} fails")
                interleaver.switch()
        finally:
            ended.append(name)

    with pytest.raises(ValueError, match=f"{failing} fails"):
        interleaver.run_pair(lambda: run("B"), lambda: run("F"))
    # A pass that never ran has not begun.
    assert sorted(ended) == (["B"] if (failing, handed_over) == ("B", 0) else ["B", "F"])
    assert threading.active_count() == before
    log: list[str] = []
    interleaver.run_pair(
        *passes(interleaver, log, {"B": 1, "F": 1})
    )  # later pairs are not affected
    assert len(log) == 4


def test_a_process_ends_without_the_thread_of_a_pass() -> None:
    assert PassInterleaver().run_pair(int, lambda: 5) == 5
    found: list[threading.Thread] = []
    PassInterleaver().run_pair(lambda: found.append(threading.current_thread()), int)
    assert found[0].daemon and not found[0].is_alive()


def test_an_interrupt_ends_both() -> None:
    interleaver = PassInterleaver()

    def interrupted() -> None:
        interleaver.switch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interleaver.run_pair(lambda: [interleaver.switch() for _ in range(3)], interrupted)


def test_a_pair_within_a_pair_is_refused() -> None:
    interleaver = PassInterleaver()
    with pytest.raises(RuntimeError, match="pairs cannot be nested"):
        interleaver.run_pair(lambda: interleaver.run_pair(int, int), int)
