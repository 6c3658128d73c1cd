"""Parts of ``engines.checkpoint``: read together, shards, manifest, directory, files, optimizer_state, codec, rng."""
