"""Records of runs: five tables, how a rank appends to them while it trains, and how they are read. Needs no torch."""
