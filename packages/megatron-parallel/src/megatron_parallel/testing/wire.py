"""Messages between the pool and its workers: a length and a pickle, over a local socket.

A function of a regular package (a directory with an ``__init__.py``) is pickled by name. Other
functions (of test files, notebooks and scripts, closures, lambdas) are pickled by value, since a
worker cannot import them; that needs cloudpickle. Tensors are copied to the CPU and detached from
their graph; no handle to shared memory outlives the call.
"""

import importlib.util
import io
import pickle
import socket
import struct
import sys
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any

import torch

try:
    import cloudpickle  # type: ignore[import-untyped]
except ModuleNotFoundError:  # pragma: no cover - the extra "testing"; `dumps` says so if needed
    cloudpickle = None

_LENGTH = struct.Struct("<Q")


def _rebuild_tensor(
    kind: type[torch.Tensor], data: bytes, dtype: torch.dtype, shape: tuple[int, ...], grad: bool
) -> torch.Tensor:
    if data:
        tensor = torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
    else:
        tensor = torch.empty(shape, dtype=dtype)
    return torch.nn.Parameter(tensor, requires_grad=grad) if kind is torch.nn.Parameter else tensor


def _rebuild_code(kind: type[CodeType], arguments: tuple[Any, ...], file: str) -> CodeType:
    return kind(*arguments).replace(co_filename=file)


class _Pickler(cloudpickle.Pickler if cloudpickle else pickle.Pickler):  # type: ignore[misc]
    """cloudpickle if it is installed, with plain tensors as bytes and the file names of code."""

    def reducer_override(self, obj: Any) -> Any:
        if (
            type(obj) in (torch.Tensor, torch.nn.Parameter)
            and obj.layout == torch.strided
            and obj.device.type != "meta"
            and not obj.is_quantized
        ):
            plain = obj.detach().cpu().resolve_conj().resolve_neg().contiguous()
            data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
            arguments = (type(obj), data, plain.dtype, tuple(plain.shape), obj.requires_grad)
            return _rebuild_tensor, arguments
        if cloudpickle is None:
            return NotImplemented
        if type(obj) is CodeType:
            # From 3.1.3 cloudpickle replaces the file name, which tracebacks show.
            return _rebuild_code, (*self.dispatch_table[CodeType](obj), obj.co_filename)
        return super().reducer_override(obj)


def _sent_by_value(function: Callable[..., Any]) -> ModuleType | None:
    """Returns the module of ``function`` if it must be pickled by value, else None."""
    function = getattr(function, "func", function)  # functools.partial
    name = getattr(function, "__module__", None)
    module = sys.modules.get(name) if name else None
    if module is None or module.__name__ == "__main__":  # pickled by value already
        return None
    root = module.__name__.partition(".")[0]
    try:
        spec = importlib.util.find_spec(root)
    except (ValueError, ModuleNotFoundError):  # a parent package that only the test runner knows
        return module
    regular = spec is not None and spec.submodule_search_locations is not None and spec.has_location
    return None if regular else module


def dumps(message: Any, *functions: Callable[..., Any]) -> bytes:
    """Pickles ``message``, with the modules of ``functions`` by value if necessary.

    Raises:
        ModuleNotFoundError: A function must be pickled by value, and cloudpickle is missing.
    """
    modules = []
    for function in functions:
        module = _sent_by_value(function)
        if module is not None and cloudpickle is None:
            raise _cloudpickle_missing(function)
        if (
            module is not None
            and module.__name__ not in cloudpickle.list_registry_pickle_by_value()
        ):
            cloudpickle.register_pickle_by_value(module)
            modules.append(module)
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(message)
    except (pickle.PicklingError, AttributeError) as error:
        if cloudpickle is None:
            raise _cloudpickle_missing(*functions) from error
        raise
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)
    return buffer.getvalue()


def _cloudpickle_missing(*functions: object) -> ModuleNotFoundError:
    names = ", ".join(getattr(f, "__qualname__", repr(f)) for f in functions) or "a result"
    return ModuleNotFoundError(
        f"{names}: only functions and classes of packages can be sent to ranks without "
        "cloudpickle; pip install 'megatron-parallel[testing]'",
        name="cloudpickle",
    )


def send(connection: socket.socket, payload: bytes) -> None:
    """Writes one message."""
    connection.sendall(_LENGTH.pack(len(payload)) + payload)


def receive(connection: socket.socket) -> bytes:
    """Reads one message.

    Raises:
        EOFError: The other side closed the connection.
    """
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    return _read(connection, length)


def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    filled = 0
    while filled < size:
        try:
            count = connection.recv_into(view[filled:])
        except ConnectionError:
            count = 0
        if count == 0:
            raise EOFError("the other side closed the connection")
        filled += count
    return bytes(data)
