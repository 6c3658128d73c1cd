"""How bytes travel: gloo, NCCL, staged through pinned memory, or over an emulated link."""
