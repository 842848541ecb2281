"""Compares what the ranks of a pipeline are about to run, without waiting for the device.

Ranks that run different steps send tensors that others do not expect: a backend aborts, hangs or
delivers zeros. So they gather a digest of each step before its first message. A CPU has the result
at once. On a CUDA device the host continues and looks at the result before each pass, and at the
latest before the next step. The gather runs before the messages of the step, so its result arrives
even if one of them hangs.
"""

from collections.abc import Mapping
from hashlib import blake2b

import torch

from megatron_parallel.collectives.operations import all_gather
from megatron_parallel.host_copy import HostCopy
from megatron_parallel.mesh.mesh import Mesh


class StepComparison:
    """The comparison of the latest step between the ranks of a pipeline."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._values: Mapping[str, str] = {}
        self._differs: HostCopy | None = None

    def start(self, values: Mapping[str, str]) -> None:
        """Starts comparing the values that describe a step.

        Raises:
            LayoutError: See `check`.
        """
        digest = int.from_bytes(blake2b(repr(values).encode(), digest_size=7).digest(), "big")
        own = torch.full((1,), digest, dtype=torch.int64, device=self._mesh.device)
        digests = all_gather(own, self._mesh.axis("pp"), purpose="step digest")
        self._values, self._differs = values, HostCopy((digests != own).any())
        self.check()

    def check(self) -> None:
        """Raises an error on all ranks if the result has arrived and values differ.

        Raises:
            LayoutError: The error names the values, which ranks exchange through the store.
        """
        if self._differs is not None and self._differs.arrived:
            self.finish()

    def finish(self) -> None:
        """Waits for the result, if there is one to come.

        Raises:
            LayoutError: See `check`.
        """
        differs, self._differs = self._differs, None
        if differs is not None and bool(differs.read()):
            self._mesh.agree("pipeline steps", self._values, axis="pp")
