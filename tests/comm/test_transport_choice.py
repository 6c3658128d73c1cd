"""What ranks cannot be asked for is refused before they start."""

import pytest
import torch
import torch.distributed as dist

from shardlab.comm.transports.choice import check_transport
from shardlab.comm.transports.nccl import NcclTransport, require_signed_zeros
from shardlab.vocabulary import HostTransport

REFUSED = [
    ("gloo", "udp", None, "transport: 'udp' is not one of shared_memory, gloo"),
    ("nccl", "udp", None, "transport: 'udp' is not one of shared_memory, gloo"),
    ("nccl", "gloo", None, "transport: these ranks send by NCCL, not 'gloo'; leave it out or use cpu"),
    ("nccl", None, "1Gbps,50us", "link: these ranks send by NCCL, which cannot be delayed; leave it out"),
]


def test_what_cannot_be_had_is_refused():
    for backend, transport, link, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            check_transport(backend, transport, link)
    for transport in (None, *HostTransport):
        check_transport("gloo", transport, "1Gbps,50us")
    check_transport("nccl", None, None)


class FromZero(NcclTransport):
    """Adds to +0, as a switch may, and only in messages of a size; on one rank."""

    name = "from zero"

    def __init__(self, group, loses):
        super().__init__(group)
        self._loses = loses

    def all_reduce(self, tensor, reduction, tag=""):
        super().all_reduce(tensor, reduction)
        if self._loses == "all_reduce" and tensor.nbytes > 1000:
            tensor.add_(0.0)

    def reduce_scatter(self, output, buffer, bounds, tag=""):
        super().reduce_scatter(output, buffer, bounds)
        if self._loses == "reduce_scatter" and dist.get_rank() == 1:
            output.add_(0.0)


def signs(rank, loses):
    """NCCL's own calls, over gloo."""
    transport = NcclTransport(dist.group.WORLD) if loses is None else FromZero(dist.group.WORLD, loses)
    try:
        require_signed_zeros(transport, dist.get_world_size(), torch.device("cpu"), (64, 4096))
    except RuntimeError as error:
        return str(error)
    return "kept"


def test_a_sum_that_loses_the_sign_of_zero_is_refused_on_all_ranks(pools):
    assert pools(3).run(signs, None) == ["kept"] * 3
    for loses in ("all_reduce", "reduce_scatter"):
        for said in pools(3).run(signs, loses):
            assert said.startswith("from zero: the sum of -0 and -0 comes back as +0")
            assert "set NCCL_NVLS_ENABLE=0" in said
