"""Ranks of a local launch use neither the network nor names in shared memory."""

import ipaddress
import json
import sys

import pytest
from megatron_train.launch.launch import launch

RANK = """
import json, os, sys
from pathlib import Path
import torch
from megatron_parallel import Mesh, ParallelLayout, all_reduce

def listening():
    # Addresses, in hexadecimal, of the sockets of this process that are in the state LISTEN.
    held = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            held.add(os.readlink(f"/proc/self/fd/{entry}"))
        except OSError:
            pass  # the descriptor of the listing itself
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{family}").read_text().splitlines()[1:]:
            _, local, _, state, *_, = words = line.split()
            if state == "0A" and f"socket:[{words[9]}]" in held:
                yield local.partition(":")[0]

with Mesh.bind(ParallelLayout(tp=2, dp=1)) as mesh:
    all_reduce(torch.ones(1), mesh.axis("tp"))
    maps = Path("/proc/self/maps").read_text().splitlines()
    shared = [line for line in maps if "/dev/shm/" in line and not line.endswith("(deleted)")]
    found = {"listening": list(listening()), "shared": shared}
    all_reduce(torch.ones(1), mesh.axis("tp"))
Path(sys.argv[3], os.environ["RANK"]).write_text(json.dumps(found))
"""


def address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Returns the address in a line of /proc/net/tcp: 32-bit words in native byte order."""
    words = (int(text[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(text), 8))
    found = ipaddress.ip_address(b"".join(words))
    return getattr(found, "ipv4_mapped", None) or found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_ranks_of_a_local_launch_listen_on_loopback_alone(tmp_path, monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    outcome = launch([sys.executable, "-c", RANK], [str(tmp_path)], 2)
    assert outcome.status == 0, outcome
    by_rank = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    sockets = [found["listening"] for found in by_rank]
    assert min(map(len, sockets)) > 0 and len(sockets[0]) > len(
        sockets[1]
    )  # rank 0 serves the store
    everywhere = [address(one) for one in (*sockets[0], *sockets[1])]
    assert [str(one) for one in everywhere if not one.is_loopback] == []
    assert [found["shared"] for found in by_rank] == [
        [],
        [],
    ]  # it would remain if ranks were killed
