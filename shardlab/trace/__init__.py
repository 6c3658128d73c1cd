"""Records of a run. Delete this package and every engine still trains, bit for bit the same."""
