"""Which notebooks are no tests."""

collect_ignore = ["kaggle.ipynb"]  # for a machine with two GPUs
