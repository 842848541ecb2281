"""Joining and leaving a job of one process: variables of a launcher, stores and shared groups."""

import socket
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_parallel import (
    CollectiveError,
    LayoutError,
    Mesh,
    ParallelLayout,
    _compat,
    bind_meshes,
)
from megatron_parallel.mesh import Grid, GridMesh, bind_grids, job, rendezvous
from megatron_parallel.mesh.devices import device_identity, local_device
from megatron_parallel.mesh.rendezvous import init_default_group

MINUTE = timedelta(minutes=1)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The variables of a job of one rank, which is left at the end."""
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_the_last_mesh_of_a_job_leaves_it() -> None:
    one, all_ = ParallelLayout(), range(1)
    meshes = bind_meshes({"a": (one, all_), "b": (one, all_)}, timeout=MINUTE)
    assert list(meshes) == ["a", "b"] and meshes["a"].timeout == MINUTE
    assert repr(meshes["a"]) == f"Mesh(rank 0 of 1, {one.resolve(1)}, cpu)"
    meshes["a"].close()
    meshes["a"].close()  # does nothing
    assert dist.is_initialized()
    meshes["b"].close()
    assert not dist.is_initialized()
    grid = Grid.of(x=1)
    with bind_grids({"images": grid}, timeout=MINUTE)["images"] as mesh:
        assert repr(mesh) == "GridMesh(rank 0 of 1, x 1, cpu)" and mesh.timeout == MINUTE
        assert dist.is_initialized() and not mesh.is_imagined
    assert not dist.is_initialized()


@pytest.mark.usefixtures("alone")
def test_a_refused_rank_leaves_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LayoutError, match="world size 1 is not a multiple of tp 2"):
        Mesh.bind(ParallelLayout(tp=2), timeout=MINUTE)
    assert not dist.is_initialized()
    with pytest.raises(LayoutError, match=r"^text needs ranks 0-1, but the job has 1 ranks$"):
        bind_meshes({"text": (ParallelLayout(), range(2))}, timeout=MINUTE)
    assert not dist.is_initialized()
    with pytest.raises(LayoutError, match=r"^images needs ranks 1-2, but the job has 1 ranks$"):
        bind_grids({"images": Grid(("x",), (2,), first_rank=1)}, timeout=MINUTE)
    assert not dist.is_initialized()

    for error in (LayoutError("ranks disagree"), CollectiveError("rank 1 did not join")):

        def differ(*_: Any, failure: Exception = error, **__: Any) -> None:
            raise failure

        with monkeypatch.context() as patch, pytest.raises(type(error), match=str(error)):
            patch.setattr(job, "agree", differ)
            Mesh.bind(ParallelLayout(), timeout=MINUTE)
        assert not dist.is_initialized()

    def lost(*_: Any) -> None:
        raise RuntimeError("[x.cc:1] Connection closed by peer. More")

    monkeypatch.setattr(_compat, "new_groups", lost)
    with pytest.raises(CollectiveError) as caught:
        Mesh.bind(ParallelLayout(), timeout=MINUTE)
    assert str(caught.value) == (
        "not all of 1 ranks created the process groups within 60 s: see their own output "
        "(Connection closed by peer)"
    )
    assert not dist.is_initialized()


@pytest.mark.usefixtures("alone")
def test_ranks_compare_layouts_first_and_what_they_created_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[tuple[str, dict[str, str]]] = []

    def agree(store: Any, topic: str, values: dict[str, str], **_: Any) -> None:
        compared.append((topic, values))

    monkeypatch.setattr(job, "agree", agree)
    layout = ParallelLayout()
    Mesh.bind(layout, configuration="digest", timeout=MINUTE).close()
    assert compared == [
        ("layout and configuration", {"layout": str(layout), "configuration": "digest"}),
        ("process groups", {"number of groups": "0"}),
    ]


@pytest.mark.parametrize("ranks", [range(0), range(0, 4, 2), range(-1, 1), range(2, 0, -1)])
def test_ranks_of_a_layout_are_consecutive(ranks: range) -> None:
    with pytest.raises(LayoutError, match=r"^text: .* is not a range of one or more consecutive"):
        bind_meshes({"text": (ParallelLayout(), ranks)})


@pytest.mark.parametrize("degrees", [{"tp": 2, "cp": 2}, {"tp": 2, "pp": 2}, {"cp": 2, "pp": 2}])
def test_a_process_without_a_launcher_is_one_rank(
    degrees: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(LayoutError, match="no process group and no RANK, WORLD_SIZE, MASTER_ADDR"):
        Mesh.bind(ParallelLayout(**degrees))
    with Mesh.bind(ParallelLayout(ep=1), timeout=MINUTE) as mesh:
        assert mesh.timeout == MINUTE and not dist.is_initialized()


def joined(
    monkeypatch: pytest.MonkeyPatch, rank: int, host: str, device: str = "cpu", **more: str
) -> dict[str, Any]:
    """Returns how a rank of 3 would join, with the arguments of the store that it would get."""
    calls: dict[str, Any] = {}

    class Server:
        def __enter__(self) -> "Server":
            return self

        def __exit__(self, *_: object) -> None:
            calls["closed"] = True

        def getsockname(self) -> tuple[str, int]:
            return "", 77

        def detach(self) -> int:
            return 5

    def listen(address: tuple[str, int], *, family: int, backlog: int) -> Server:
        calls["listens"] = (*address, family)
        assert backlog >= 3
        return Server()

    def store(*arguments: Any) -> tuple[Any, ...]:
        return arguments

    def init(backend: str, **settings: Any) -> None:
        calls.update(settings, backend=backend)

    variables = {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": host, "MASTER_PORT": "70"}
    for name, value in (variables | more).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rendezvous.socket, "create_server", listen)
    monkeypatch.setattr(_compat, "tcp_store", store)
    monkeypatch.setattr(dist, "init_process_group", init)
    init_default_group(torch.device(device), MINUTE)
    return calls


def test_the_first_rank_of_one_machine_listens_on_its_loopback_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    group = {"backend": "gloo", "timeout": MINUTE, "world_size": 3}
    assert joined(monkeypatch, 0, "localhost") == {
        **group,
        "listens": ("127.0.0.1", 70, socket.AF_INET),
        "store": ("127.0.0.1", 77, 3, MINUTE, 5),
        "rank": 0,
        "closed": True,
    }
    assert joined(monkeypatch, 0, "::1")["listens"] == ("::1", 70, socket.AF_INET6)


def test_other_ranks_connect_and_other_machines_use_the_store_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    plain = {"backend": "gloo", "timeout": MINUTE}
    store = ("127.0.0.1", 70, 3, MINUTE)
    connected = {**plain, "store": store, "rank": 2, "world_size": 3}
    assert joined(monkeypatch, 2, "127.0.0.1") == connected
    assert joined(monkeypatch, 0, "10.0.0.7") == plain
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert joined(monkeypatch, 0, "127.0.0.1", **agent) == plain
    assert joined(monkeypatch, 998, "10.0.0.7", WORLD_SIZE="999") == plain
    assert joined(monkeypatch, 0, "10.0.0.7", "cuda") == {
        "backend": "nccl",
        "timeout": timedelta(minutes=2),  # a minute to find and name the missing rank
    }


def test_the_device_of_a_rank_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert local_device("cuda") == torch.device("cuda", 2) == current[-1]
    monkeypatch.delenv("LOCAL_RANK")
    assert local_device("cuda") == torch.device("cuda", 0) == current[-1]
    assert local_device("cuda:3") == torch.device("cuda", 3) == current[-1]
    assert local_device("cpu") == torch.device("cpu") and len(current) == 3
    monkeypatch.setenv("LOCAL_RANK", "100")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 101)
    assert local_device("cuda") == torch.device("cuda", 100)


def test_a_gpu_is_identified_by_name_number_and_host(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="A GPU", uuid="u-1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert device_identity(torch.device("cuda:1")) == f"A GPU u-1 of {socket.gethostname()}"


def test_meshes_whose_host_does_not_wait_have_a_watchdog() -> None:
    layout, groups = ParallelLayout(tp=2, dp=1), {(0, 1): object()}
    for device, given, watched in (
        ("cuda", groups, True),
        ("cuda", {}, False),
        ("cpu", groups, False),
    ):
        mesh = Mesh(layout, 0, device, groups=given)  # type: ignore[arg-type]
        dog = mesh.axis("tp").watchdog
        assert (dog is not None) == watched and mesh.axis("world").watchdog is dog
        mesh.close()
        assert dog is None or dog._closed.is_set()
    grid = GridMesh(Grid.of(a=2, b=2), 3)
    assert (grid.axis("a").ranks, grid.axis("b").index, grid.world_size) == ((2, 3), 1, 4)


def test_experts_in_other_pipeline_groups_have_no_groups_without_expert_parallelism() -> None:
    layout = ParallelLayout(cp=2, pp=2, dp=2, order="tp-cp-pp-ep-dp")
    assert not {"ep", "expert_tp", "expert_dp"} & {*layout.group_names}
    assert {"tp", "cp", "pp", "dp", "embedding", "world"} <= {*layout.group_names}
    last = ParallelLayout(cp=2, pp=2, dp=2)
    assert {"ep", "expert_tp", "expert_dp"} <= {*last.group_names}
