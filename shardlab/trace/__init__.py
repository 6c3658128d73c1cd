"""Records of a run. Delete this room and every engine still trains, bit for bit the same."""
