"""Checks of model sizes, shared by the configs."""


def require_positive(**sizes: int) -> None:
    """Raise ValueError, naming the first field, unless every size is 1 or more."""
    for field, size in sizes.items():
        if size < 1:
            raise ValueError(f"{field} must be at least 1, got {size}")
