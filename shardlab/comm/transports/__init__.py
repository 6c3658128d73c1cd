"""How bytes move between ranks: shared memory, gloo, NCCL, staged through pinned memory, or an emulated link."""
