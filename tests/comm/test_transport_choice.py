"""What ranks cannot be asked for is refused before they start."""

import pytest

from shardlab.comm.mesh import check_transport
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
