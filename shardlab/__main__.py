"""``python -m shardlab``: the same as the command ``shardlab``, also under ``torchrun -m``."""

from shardlab.cli import main

main()
