"""Meshes of one process without torch.distributed, and of ranks that must agree first."""

import copy
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron_parallel import (
    AbstractMesh,
    CollectiveError,
    LayoutError,
    Mesh,
    ParallelLayout,
    _compat,
    all_reduce,
)
from megatron_parallel.mesh.imagined import ImaginedJob
from megatron_parallel.mesh.rendezvous import loopback_address
from megatron_parallel.testing import Rank, WorkerPool
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend


def test_a_single_process_needs_no_process_group(single: Mesh) -> None:
    assert not torch.distributed.is_initialized()
    for name in ("tp", "cp", "dp", "pp", "ep", "dp_cp", "model", "tp_pp", "embedding", "world"):
        axis = single.axis(name)
        assert (axis.size, axis.index, axis.ranks, axis.group) == (1, 0, (0,), None)
    single.agree("anything", {"a": "b"})
    single.close()


def test_bind_without_torchrun_serves_one_rank_and_refuses_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with Mesh.bind(ParallelLayout()) as mesh:
        assert (mesh.world_size, mesh.rank, mesh.device) == (1, 0, torch.device("cpu"))
    with pytest.raises(LayoutError, match=r"no process group and no RANK, .* torchrun"):
        Mesh.bind(ParallelLayout(tp=2))


def test_ranks_that_do_not_start_are_reported_in_one_line_within_the_time_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CollectiveError) as caught:
        Mesh.bind(ParallelLayout(tp=2), timeout=timedelta(seconds=1))
    line = str(caught.value)
    assert line.startswith(
        f"rank 0 could not join the job of 2 ranks at 127.0.0.1:{port} within 1 s"
    )
    assert "\n" not in line and not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MASTER_PORT", "65536"),
        ("MASTER_PORT", "http"),
        ("MASTER_PORT", "9" * 5000),
        ("RANK", "1"),
        ("RANK", "-1"),
        ("WORLD_SIZE", ""),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", str(2**31)),
    ],
)
def test_invalid_environment_variables_are_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for each, text in (variables | {name: value}).items():
        monkeypatch.setenv(each, text)
    with pytest.raises(
        LayoutError, match=rf"variable {name} is '.*': set it to a whole number"
    ) as caught:
        Mesh.bind(ParallelLayout())
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_consecutive_jobs_of_one_process_can_use_one_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    meshes = []
    for _ in range(2):
        with Mesh.bind(ParallelLayout()) as mesh:
            meshes.append(mesh)  # referenced until the end
    with socket.create_server(("127.0.0.1", int(port))), pytest.raises(CollectiveError) as caught:
        Mesh.bind(ParallelLayout())
    assert str(caught.value).startswith(f"rank 0 cannot listen on 127.0.0.1:{port} (MASTER_ADDR")


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.8.9.10", "127.8.9.10"),
        ("::1", "::1"),
        ("localhost", "127.0.0.1"),
        ("10.0.0.7", None),
        ("0.0.0.0", None),
        ("localhost.example.org", None),
    ],
)
def test_only_addresses_of_this_machine_are_loopback(host: str, address: str | None) -> None:
    assert loopback_address(host) == address


def test_a_mesh_without_groups_has_coordinates_and_cannot_communicate() -> None:
    mesh = Mesh(ParallelLayout(tp=2, pp=4).resolve(16), 6)
    assert mesh.axis("tp").ranks == (6, 7) and mesh.axis("pp").index == 1
    assert not mesh.has_axis("embedding")
    with pytest.raises(LayoutError, match="rank 6 is in no 'embedding' group"):
        mesh.axis("embedding")
    with pytest.raises(LayoutError, match="axis 'tp' of 2 ranks has no process group"):
        all_reduce(torch.ones(1), mesh.axis("tp"))


def test_stages_that_share_parameters_have_an_axis() -> None:
    layout = ParallelLayout(tp=2, pp=4).resolve(16)  # 2 replicas
    inside, outside = Mesh(layout, 9), Mesh(layout, 5)
    for mesh in (inside, outside):
        assert mesh.add_stage_group((3, 0, 2)) == "stages_0_2_3"
    assert inside.axis("stages_0_2_3").ranks == (1, 9, 13)
    assert inside.axis("stages_0_2_3").index == 1
    assert not outside.has_axis("stages_0_2_3")
    assert AbstractMesh(layout, 9).axis("stages_0_2_3").size == 3
    assert AbstractMesh(layout, 9).has_axis("stages_0_2_3")
    assert not AbstractMesh(layout, 5).has_axis("stages_0_2_3")
    with pytest.raises(LayoutError, match="pipeline rank 4 does not exist: pp=4"):
        inside.add_stage_group((0, 4))


def test_stages_of_a_mesh_of_some_ranks_cannot_share_parameters_without_a_group() -> None:
    job = SimpleNamespace(world_size=8, number=0, enter=lambda: None)
    mesh = Mesh(ParallelLayout(pp=4).resolve(4), 1, job=job)  # type: ignore[arg-type]
    assert mesh.add_stage_group(range(4)) == "stages_0_1_2_3"  # the group of the axis pp
    with pytest.raises(
        LayoutError, match=r"pipeline ranks \[0, 1, 3\] of a mesh with 4 of 8 ranks"
    ):
        mesh.add_stage_group((0, 1, 3))


@pytest.mark.slow  # the integration tests also start ranks like this, by a command of the README
def test_ranks_started_by_torchrun_join_each_other(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(
        "import torch\n"
        "from megatron_parallel import Mesh, ParallelLayout, all_reduce\n"
        "with Mesh.bind(ParallelLayout(tp=2)) as mesh:\n"
        "    total = all_reduce(torch.ones(3), mesh.axis('tp'))\n"
        "    assert total.tolist() == [2.0] * 3 and mesh.world_size == 2\n"
        "assert not torch.distributed.is_initialized()\n"
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*launch, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def groups_of(mesh: Mesh) -> dict[str, tuple[tuple[int, ...], int, float]]:
    found = {}
    for name in mesh.layout.group_names:
        if mesh.has_axis(name):
            axis = mesh.axis(name)
            total = all_reduce(torch.tensor(2.0**mesh.rank, dtype=torch.float64), axis)
            found[name] = (axis.ranks, axis.index, total.item())
    return found


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(tp=2, pp=2, dp=2),
        ParallelLayout(cp=2, ep=4, dp=2, pp=2),
        ParallelLayout(tp=2, dp=2, order="dp-tp-pp"),
    ],
    ids=str,
)
def test_every_group_communicates_among_its_ranks(
    worker_pool: WorkerPool, layout: ParallelLayout
) -> None:
    for rank, found in enumerate(worker_pool.run_mesh(layout, groups_of, timeout=60)):
        for name, (ranks, index, total) in found.items():
            assert ranks == layout.group_of(name, rank) and ranks[index] == rank
            assert total == sum(2.0**member for member in ranks)


def test_equal_sets_of_ranks_share_one_group(worker_pool: WorkerPool) -> None:
    def shared(mesh: Mesh) -> bool:
        tp = mesh.axis("tp").group
        assert mesh.axis("cp").group is None  # of one rank
        return tp is mesh.axis("tp_cp").group and tp is mesh.axis("model").group

    assert worker_pool.run_mesh(ParallelLayout(tp=2), shared, ranks=4) == [True] * 4


def test_closing_destroys_the_groups_and_a_new_mesh_can_follow(worker_pool: WorkerPool) -> None:
    def rebind(rank: Rank) -> list[int]:
        sizes = []
        for layout in (ParallelLayout(tp=2), ParallelLayout(pp=4), ParallelLayout(tp=4)):
            with Mesh.bind(layout, timeout=timedelta(seconds=20)) as mesh:
                total = all_reduce(torch.ones(1), mesh.axis("model"))
                sizes.append(int(total.item()))
            mesh.close()
        return sizes

    assert worker_pool.run(rebind, ranks=4, timeout=60) == [[2, 4, 4]] * 4


def test_configurations_that_differ_are_an_error_on_every_rank(worker_pool: WorkerPool) -> None:
    def bind(rank: Rank) -> str:
        notes = {"configuration": f"digest{rank.rank // 3}", "stage shapes": f"{rank.rank % 2}"}
        with pytest.raises(LayoutError) as caught:
            Mesh.bind(ParallelLayout(tp=2), configuration=notes, timeout=timedelta(seconds=600))
        return str(caught.value)

    # The time-out of the pool is shorter than that of the mesh.
    assert set(worker_pool.run(bind, ranks=4, timeout=120)) == {
        "ranks disagree on configuration: ranks 0-2: digest0; rank 3: digest1 | "
        "ranks disagree on stage shapes: ranks 0, 2: 0; ranks 1, 3: 1"
    }


def test_later_agreements_are_checked_too(worker_pool: WorkerPool) -> None:
    def stages(mesh: Mesh) -> str:
        mesh.agree("stages", {"shape": "same"})
        try:
            mesh.agree("stages", {"shape": str(mesh.rank)})
        except LayoutError as error:
            return str(error)
        return ""

    message = "ranks disagree on shape: rank 0: 0; rank 1: 1"
    assert worker_pool.run_mesh(ParallelLayout(pp=2), stages, ranks=2) == [message] * 2


def test_a_model_that_holds_an_axis_can_be_copied(worker_pool: WorkerPool) -> None:
    def copied(mesh: Mesh) -> bool:
        axis = mesh.axis("tp")
        return copy.deepcopy({"axis": axis})["axis"] is axis

    assert worker_pool.run_mesh(ParallelLayout(tp=2), copied, ranks=2) == [True, True]


def test_groups_of_a_large_job_need_no_barrier_and_have_one_name_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Binds 1,024 ranks one by one. Pipeline ranks 0 and 3 have an embedding group."""
    barriers: list[object] = []
    monkeypatch.delenv("TORCH_DIST_INIT_BARRIER", raising=False)
    monkeypatch.setattr(
        distributed_c10d, "_store_based_barrier", lambda *a, **_: barriers.append(a)
    )
    layout = ParallelLayout(tp=8, pp=4, dp=32)
    sets = [ranks for name in layout.group_names for ranks in layout.groups(name)]
    sets = list(dict.fromkeys(ranks for ranks in sets if len(ranks) > 1))
    found = []
    for rank in (0, 256, 768):
        dist.init_process_group("fake", rank=rank, world_size=1024, store=dist.HashStore())
        barriers.clear()
        groups = _compat.new_groups(sets, timedelta(seconds=60))
        found.append({ranks: group.group_name for ranks, group in groups.items()})
        dist.destroy_process_group()
    first, inner, last = found
    assert len(sets) == 709 and barriers == []
    assert [len(each) for each in found] == [7, 6, 7]
    for one, other in ((first, inner), (first, last), (inner, last)):
        common = one.keys() & other.keys()
        assert len(common) >= 3 and all(one[ranks] == other[ranks] for ranks in common)


def test_a_rank_of_an_imagined_job_has_its_axes_and_leaves_the_job_when_closed() -> None:
    layout, hook = ParallelLayout(tp=2, pp=3, dp=2), sys.excepthook
    with Mesh.imagined(layout, 7) as mesh:
        assert sys.excepthook is hook  # not torch's, which writes the rank before every line
        assert mesh.is_imagined and mesh.world_size == 12 and dist.is_initialized()
        assert mesh.axis("tp").ranks == (6, 7) and mesh.axis("pp").ranks == (3, 7, 11)
        assert mesh.axis("tp").process_group.size() == 2
        assert mesh.add_stage_group((0, 1)) == "stages_0_1"
        shared = mesh.axis("stages_0_1").process_group
        assert mesh.add_stage_group((1, 0)) == "stages_0_1" and shared.size() == 2
        assert mesh.axis("stages_0_1").process_group is shared
        assert mesh.axis("cp").group is None and mesh.axis("world").group is not None
        assert mesh.add_stage_group((2,)) is None
        mesh.agree("anything", {"a": "b"})  # asks no rank
        with pytest.raises(LayoutError, match="close the mesh of the other rank first"):
            Mesh.imagined(layout, 0)
        mesh.close()
        assert not dist.is_initialized()
        mesh.close()
    assert repr(mesh) == f"Mesh(rank 7 of 12, {layout}, cpu)"
    for rank in (-1, 12):
        with pytest.raises(LayoutError, match=f"rank {rank} is outside a world of 12 ranks"):
            Mesh.imagined(layout, rank)
    alone = Mesh.imagined(ParallelLayout(dp=1))
    assert not alone.is_imagined and not dist.is_initialized()


def test_ranks_of_a_mesh_may_begin_at_another_rank() -> None:
    mesh = Mesh(ParallelLayout(tp=2, pp=2, dp=1), 7, first_rank=4)
    assert mesh.axis("tp").ranks == (6, 7) and mesh.axis("pp").ranks == (5, 7)
    assert mesh.axis("world").index == 3 and mesh.timeout == timedelta(minutes=10)
    assert mesh.add_stage_group((0, 1)) == "stages_0_1"
    assert mesh.axis("stages_0_1").ranks == (5, 7)


def test_a_closed_mesh_destroys_its_groups_and_leaves_those_of_other_meshes() -> None:
    layout = ParallelLayout(tp=2, dp=2)
    job = ImaginedJob(0, 4, torch.device("cpu"), timedelta(minutes=1))
    first, second = (
        Mesh(layout, 0, groups=job.create_groups([(0, 1), (0, 2)]), job=job) for _ in range(2)
    )
    gone, kept = first.axis("tp").process_group, second.axis("tp").process_group
    first.close()
    assert dist.get_process_group_ranks(kept) == [0, 1]
    with pytest.raises(KeyError):
        dist.get_process_group_ranks(gone)
    second.close()
    assert not dist.is_initialized()
