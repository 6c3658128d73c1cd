"""What each rank runs: one strategy, recorded and checked."""
