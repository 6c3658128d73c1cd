"""What is trained: a workload, its batches, how its layers are divided."""
