"""The code that torch.compile generates for an H100, on a machine without a GPU.

Inductor lowers every graph and writes its Triton kernels as it does for that GPU. Nothing compiles
them further: a call runs the graph on tensors without values. Most of what is replaced here is
private to torch; it was written for torch 2.13.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import torch
from h100 import Driver
from megatron_parallel.imagined import DeviceLedger
from torch._dynamo.device_interface import get_interface_for_device
from torch._functorch import config as functorch_config
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes import fuse_attention, joint_graph
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
from torch._inductor.virtualized import V
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import driver

_H100: Final = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=80 << 30,
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    warp_size=32,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20,
    gcnArchName="",
    uuid=0,
)


@dataclass
class GraphCode:
    """The code of one graph.

    Attributes:
        backward: Whether it is a backward pass.
        kernels: Number of Triton kernels.
        nbytes: What they read and write; a tensor counts once for each kernel.
        products: Number of kernels of libraries: matrix products and attention.
        source: The generated code.
        calls: How often it was called.
    """

    backward: bool
    kernels: int
    nbytes: int
    products: int
    source: str
    calls: int = 0


@contextmanager
def code_for_h100(ledger: DeviceLedger) -> Iterator[list[GraphCode]]:
    """Yields the code of graphs that are compiled in the block, in their order.

    Args:
        ledger: The ledger of the imagined CUDA device. It does not count what compiled code does.
    """
    codes = list[GraphCode]()

    def compile_graph(graph: Any, inputs: Any, **options: Any) -> Callable[[Any], Any]:
        runs = deepcopy(graph)
        code = _lower(graph, inputs, options)
        codes.append(code)

        def call(arguments: list[Any]) -> Any:
            given = list(arguments)
            arguments.clear()  # as compiled code does, so that memory is free when it is not needed
            kernels, moved = ledger.kernels.copy(), ledger.bytes_moved.copy()
            found = runs(*given)
            ledger.kernels, ledger.bytes_moved = kernels, moved
            code.calls += 1
            return found

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    whole = compile_fx.compile_fx

    def compile_whole(*args: Any, **options: Any) -> Any:
        return whole(*args, **{"inner_compile": compile_graph, **options})

    with _seems_an_h100(), patch.object(compile_fx, "compile_fx", compile_whole):
        yield codes


def _lower(graph: Any, inputs: Any, options: dict[str, Any]) -> GraphCode:
    """Returns the code of a graph, which is changed; steps are those of Inductor's compiler."""
    inference, backward = (bool(options.get(key)) for key in ("is_inference", "is_backward"))
    compile_fx.view_to_reshape(graph)
    with torch.no_grad():
        mode = compile_fx.fake_tensor_prop(graph, inputs)
    compile_fx._recursive_record_original_output_strides(graph)
    with V.set_fake_mode(mode):
        compile_fx._recursive_post_grad_passes(graph, is_inference=inference)
        lowering = GraphLowering(
            graph,
            example_inputs=inputs,
            shape_env=graph.shape_env,
            graph_id=options.get("graph_id"),
            is_inference=inference,
            is_backward=backward,
        )
        lowering.freeze_runtime_asserts()
        with (
            V.set_graph_handler(lowering),
            V.set_extern_kernel_nodes([]),
            V.set_debug_handler(DebugContext()),
        ):
            lowering.run(*inputs)
            source = lowering.codegen()[0].value
            nodes = [
                node
                for node in lowering.scheduler.nodes
                if not isinstance(node, NopKernelSchedulerNode)
            ]
            ours = [node for node in nodes if not isinstance(node, ExternKernelSchedulerNode)]
            nbytes = sum(node.get_read_write_buffers_sizes() for node in ours)
    # A result of a library's kernel that has several is a node of its own, which starts nothing.
    products = sum(
        isinstance(node, ExternKernelSchedulerNode) and type(node.node).__name__ != "MultiOutput"
        for node in nodes
    )
    return GraphCode(backward, len(ours), int(nbytes), products, source)


@contextmanager
def _seems_an_h100() -> Iterator[None]:
    """Answers what Inductor and Triton ask of a GPU."""
    cuda: Any = get_interface_for_device("cuda")
    driver.set_active(Driver("cuda:0"))
    zero, h100 = (lambda *_, **__: 0), (lambda *_, **__: _H100)
    fold = joint_graph.UniformValueConstantFolder._deduce_value

    def fold_on_host(self: Any, node: Any) -> Any:
        with _OnHost():
            return fold(self, node)

    with ExitStack() as stack:
        stack.enter_context(
            patch.multiple(
                torch.cuda,
                get_device_properties=h100,
                # Dynamo has a table of these functions, so each is one of its own.
                _exchange_device=lambda _: 0,
                _maybe_exchange_device=lambda _: 0,
            )
        )
        stack.enter_context(
            patch.multiple(
                cuda,
                is_available=staticmethod(lambda: True),
                is_bf16_supported=staticmethod(lambda *_, **__: True),
                current_device=staticmethod(zero),
                device_count=staticmethod(lambda: 1),
                get_device_properties=staticmethod(h100),
                get_compute_capability=staticmethod(lambda *_, **__: 90),
            )
        )
        stack.enter_context(patch.object(cuda.Worker, "get_device_properties", staticmethod(h100)))
        # It traces written-out attention on a device that has to exist. Models call SDPA.
        stack.enter_context(patch.object(fuse_attention, "_sfdp_init", lambda *_: None))
        stack.enter_context(
            patch.object(joint_graph.UniformValueConstantFolder, "_deduce_value", fold_on_host)
        )
        stack.enter_context(patch("megatron_kernels._compat.has_gpu", lambda: True))
        # Whether products are padded is decided by timing them.
        settings = {"force_disable_caches": True, "compile_threads": 1, "shape_padding": False}
        stack.enter_context(inductor_config.patch(settings))
        stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        yield


class _OnHost(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes tensors of a device on the host: constants, which need values to be folded."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if "device" in given:
            given["device"] = torch.device("cpu")
        return func(*args, **given)
