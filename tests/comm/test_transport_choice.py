"""What ranks cannot be asked for is refused before they start."""

import pytest

from shardlab.comm.transports.choice import check_transport
from shardlab.vocabulary import HostTransport


@pytest.mark.parametrize(
    ("backend", "transport", "link", "message"),
    [
        ("gloo", "udp", None, "transport: 'udp' is not one of shared_memory, gloo"),
        ("nccl", "udp", None, "transport: 'udp' is not one of shared_memory, gloo"),
        ("nccl", "gloo", None, "transport: ranks with a GPU each send by NCCL, not 'gloo'; leave it out or use cpu"),
        ("nccl", None, "1Gbps,50us", "link: ranks with a GPU each send by NCCL, which cannot be delayed; leave it out"),
    ],
)
def test_refused(backend, transport, link, message):
    with pytest.raises(ValueError, match=message):
        check_transport(backend, transport, link)


@pytest.mark.parametrize("transport", [None, *HostTransport])
@pytest.mark.parametrize("link", [None, "1Gbps,50us"])
def test_allowed(transport, link):
    check_transport("gloo", transport, link)
    check_transport("nccl", None, None)
