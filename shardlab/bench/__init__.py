"""What is measured on this machine: engines against torch's, what forecasts stand on, and how far they miss.

``against_torch`` is ``shardlab bench``; ``calibrate``, with the times of operations, messages and engines, is
``shardlab calibrate``; ``validated_here`` holds forecasts against runs.
"""
