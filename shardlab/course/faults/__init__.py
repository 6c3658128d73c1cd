"""Faults on purpose: a straggler, a dead or stopped rank, a skipped or another collective, NaN, no memory, a bad link.

``inject`` and ``faulty`` make them happen at a chosen rank, step and phase.
"""
