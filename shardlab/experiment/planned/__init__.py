"""What is known of a run before it: bytes, messages, time."""
