"""Records of a script that knows nothing of shardlab: its collectives, spans, memory and steps, and nothing changed.

    with shardlab.record("runs/mine"):      # in a script or a cell, on every rank
        train()

    torchrun --nproc-per-node 2 -m shardlab record train.py --its --arguments

``record`` opens and closes a record, ``inferred_loop`` infers steps and phases from what the script calls,
``global_hooks`` listens to those calls, ``script_tensors`` says what the process holds, ``script_collectives`` what it
sends, with the words of ``torch_callers``, and ``report`` reads the record.
"""
