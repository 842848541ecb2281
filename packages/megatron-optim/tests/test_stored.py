"""How many elements are rounded at random at once."""

import pytest
import torch
from megatron_optim.stored import Part, StochasticallyRounded
from megatron_parallel import Mesh, Sharding, View, parameter_views
from torch import Tensor


def test_few_elements_are_rounded_at_random_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices are rows of up to 10 elements, at least one; a call ends once it has 10."""
    sizes: list[int] = []

    def key(numbers: Tensor, index: Tensor) -> Tensor:
        sizes.append(len(numbers))
        return torch.zeros_like(index, dtype=torch.int32)

    def stored(shape: tuple[int, ...]) -> StochasticallyRounded:
        def views(values: Tensor) -> list[View]:
            return parameter_views({"a": values}, {"a": Sharding(shape)}, Mesh.single())["a"]

        return StochasticallyRounded(torch.zeros(shape, dtype=torch.bfloat16), views, 1, key)

    monkeypatch.setattr("megatron_optim.stored._ROUNDED_AT_ONCE", 10)
    parts = [Part(s, 0, s.numel) for s in map(stored, ((9, 5), (3,), (), (2, 0), (7,), (4,)))]
    parts.append(Part(stored((2, 12)), 0, 24))
    StochasticallyRounded.store(parts, [torch.ones(part.stop) for part in parts])
    assert sizes == [10, 10, 10, 10, 5 + 3 + 1 + 7, 4 + 12, 12]
    assert all((part.stored.load_all() == 1).all() for part in parts)
