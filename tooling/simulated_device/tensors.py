"""Tensors with the device `cuda:0` that compute on the CPU."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from megatron_parallel.imagined.code_line import code_line
from megatron_parallel.imagined.functions import Queue
from megatron_parallel.imagined.sizes import needs_size
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
CUDA = torch.device("cuda:0")

# Operations that accept tensors of both devices: copies, and indexing with host indices.
_BETWEEN_DEVICES = (
    aten.copy_.default,
    aten._to_copy.default,
    aten.index.Tensor,
    aten.index_put_.default,
    aten.index_put.default,
    aten._index_put_impl_.default,
)

# Lazy conjugates and negatives are computed eagerly, since below `__torch_dispatch__` their flag is
# lost.
_EAGER = {
    aten._conj.default: aten.conj_physical.default,
    aten._neg_view.default: aten.neg.default,
}


class DeviceTensor(Tensor):
    """A tensor on the simulated device; `on_host` holds its values."""

    on_host: Tensor
    owner: "Dispatch"

    @staticmethod
    def __new__(cls, on_host: Tensor, owner: "Dispatch") -> "DeviceTensor":
        t = Tensor._make_wrapper_subclass(
            cls,
            on_host.shape,
            strides=on_host.stride(),
            storage_offset=on_host.storage_offset(),
            dtype=on_host.dtype,
            device=CUDA,
            requires_grad=False,
        )
        t.on_host, t.owner = on_host, owner
        return t

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({self.on_host!r})"

    def record_stream(self, stream: Any) -> None:
        """Does nothing, since the memory is the host's."""

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs operations in threads of autograd, where the mode is not active."""
        found = next(t for t in tree_leaves((args, kwargs)) if isinstance(t, DeviceTensor))
        return found.owner.run(func, args, dict(kwargs or {}))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.data_ptr, Tensor.untyped_storage):
            return func(args[0].on_host)
        if func is Tensor.tolist:
            args[0].owner.waits_for("tolist")
            return args[0].on_host.detach().tolist()
        if func in (Tensor.numpy, Tensor.__array__):
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the "
                "tensor to host memory first."
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            args[0].on_host = args[1].on_host
        return result


class Dispatch(TorchDispatchMode):
    """Runs operations on the values of device tensors, and counts synchronizations.

    Attributes:
        waits: Number of times the host would wait for a device, by cause and code line.
        blocking_copies: Number of copies from pageable host memory to the device, by code line.
        threads: Names of the threads that computed.
        queue: The operations on device tensors, by which events are reached.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.blocking_copies: Counter[str] = Counter()
        self.threads: set[str] = set()
        self.queue = Queue()

    def waits_for(self, what: str) -> None:
        self.queue.drain()
        self.waits[f"{what} at {code_line()}"] += 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self.run(func, args, dict(kwargs or {}))

    @contextmanager
    def in_new_threads(self) -> Iterator[None]:
        """Runs operations of Python threads that start in the block, too: modes have one thread."""
        run = threading.Thread.run

        def with_mode(thread: threading.Thread) -> None:
            with _InThread(self):
                run(thread)

        with patch.object(threading.Thread, "run", with_mode):
            yield

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        on_device = [t for t in tensors if isinstance(t, DeviceTensor)]
        host = [t for t in tensors if not isinstance(t, DeviceTensor)]
        wanted = kwargs.get("device")
        wanted = None if wanted is None else torch.device(wanted)
        if func is aten._pin_memory.default:
            return args[0]
        if func.namespace == "c10d":
            return _communicate(func, args, kwargs, on_device, host)
        if not on_device and (wanted is None or wanted.type != "cuda"):
            return func(*args, **kwargs)
        if on_device:
            self.queue.add()
            self.threads.add(threading.current_thread().name)
            if func not in _BETWEEN_DEVICES:
                _refuse_mixed(func, host)
        if func is aten.is_pinned.default:
            return False
        self._note(func, args, kwargs, on_device, host, wanted)
        if wanted is not None:
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        if func is aten._to_copy.default:
            kwargs.pop("non_blocking", None)
        func = _EAGER.get(func, func)
        out = func(*tree_map(_held, args), **tree_map(_held, kwargs))
        if func is aten._to_copy.default and on_device and out is on_device[0].on_host:
            out = out.clone()
        stays = wanted is not None and wanted.type == "cpu"
        return tree_map(self._wrapper(on_device, host, stays), out)

    def _note(
        self,
        func: Any,
        args: Any,
        kwargs: Mapping[str, Any],
        on_device: list[DeviceTensor],
        host: list[Tensor],
        wanted: torch.device | None,
    ) -> None:
        """Counts waits and blocking copies."""
        to_device = func is aten._to_copy.default and not on_device
        waits = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2] is True))
        if on_device and func is aten._local_scalar_dense.default:
            self.waits_for("item")
        if on_device and needs_size(func, args, kwargs):
            self.waits_for(f"size of {func.__name__}")
        if (
            on_device
            and func is aten._to_copy.default
            and wanted is not None
            and wanted.type == "cpu"
            and waits
        ):
            self.waits_for("copy to the host")
        if on_device and func is aten.copy_.default:
            if not isinstance(args[0], DeviceTensor) and waits:
                self.waits_for("copy to the host")
            to_device = bool(host) and args[0] is on_device[0]
        if to_device and waits:
            self.blocking_copies[code_line()] += 1

    def _wrapper(
        self, on_device: list[DeviceTensor], host: list[Tensor], stays: bool
    ) -> Callable[[Any], Any]:
        """Returns a function that wraps new results as device tensors and keeps inputs."""

        def wrap(x: Any) -> Any:
            if not isinstance(x, Tensor) or isinstance(x, DeviceTensor):
                return x
            original = next((t for t in on_device if t.on_host is x), None)
            if original is not None:
                return original
            return x if stays or any(t is x for t in host) else DeviceTensor(x, self)

        return wrap


@contextmanager
def functions_in_backward_passes() -> Iterator[None]:
    """Calls `DeviceTensor.__torch_function__` for hooks of backward passes that start in the block.

    The function that starts the pass is one of the tensors' functions itself, during which torch
    disables them, also in the threads of autograd.
    """
    run = torch.autograd._engine_run_backward

    def enabled(*arguments: Any, **options: Any) -> Any:
        with torch._C._EnableTorchFunction():
            return run(*arguments, **options)

    with patch.object(torch.autograd, "_engine_run_backward", enabled):
        yield


class _InThread(TorchDispatchMode):
    """Runs operations of another thread."""

    def __init__(self, dispatch: Dispatch) -> None:
        super().__init__()
        self._dispatch = dispatch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._dispatch.run(func, args, dict(kwargs or {}))


def _communicate(
    func: Any, args: Any, kwargs: dict[str, Any], on_device: list[DeviceTensor], host: list[Tensor]
) -> Any:
    """Runs a collective over Gloo. Like NCCL, it accepts only device tensors."""
    if any(t.numel() for t in host):
        raise RuntimeError(
            f"No backend type associated with device type cpu ({func}, {code_line()})"
        )
    out = func(*tree_map(_held, args), **tree_map(_held, kwargs))
    return tree_map(lambda x: next((t for t in on_device if t.on_host is x), x), out)


def _refuse_mixed(func: Any, host: list[Tensor]) -> None:
    if any(t.dim() for t in host):  # host scalars are allowed
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 "
            f"and cpu! ({func}, {code_line()})"
        )


def _held(x: Any) -> Any:
    return x.on_host if isinstance(x, DeviceTensor) else x
