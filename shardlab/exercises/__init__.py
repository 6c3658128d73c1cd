r"""Work that marks itself: ``check("zero1.owners", my_function)`` runs the function on real ranks.

Whoever writes an exercise of their own gives a task, a starter that does not pass, and cases: for each rank the inputs
and the wanted result. The learner's function gets the communicator and the inputs of its rank. Ten lines are enough:

    from shardlab.exercises import Case, Exercise, check

    def cases():
        inputs = tuple((float(rank),) for rank in range(3))
        return [Case("3 ranks", inputs, wanted=(1.0, 1.0, 1.0))]

    mean = Exercise(
        "class.mean", "class_mean(comm, value): the mean of value over the ranks.",
        "def class_mean(comm, value):\n    return value  # your code", cases,
    )
    check(mean, class_mean)

``Case(traffic=...)`` limits messages and bytes, ``Case(axes=...)`` makes a mesh of several axes, ``hints=`` are given
one by one, ``attempt=`` says what a rank does with the function; it may return ``Measured``, so that what was held and
a ``VirtualClock`` are scored too. ``shardlab exercises --grade FOLDER --with FILE`` marks a class by the exercises of a
file as well.
"""

from typing import TYPE_CHECKING

from shardlab.installed import imported_when_used

if TYPE_CHECKING:
    from shardlab.exercises.exercise import (  # isort: skip
        Case, Exercise, Measured, Message, Traffic, VirtualClock, call, call_in_place, call_without_ranks,
    )  # fmt: skip
    from shardlab.exercises.in_a_cell import Prediction, check, find, hint, predict, task
    from shardlab.exercises.judge import Report, Verdict
    from shardlab.exercises.ladder import LADDER

__all__ = [
    "LADDER", "Case", "Exercise", "Measured", "Message", "Prediction", "Report", "Traffic", "Verdict", "VirtualClock",
    "call", "call_in_place", "call_without_ranks", "check", "find", "hint", "predict", "task",
]  # fmt: skip

# A rank that runs an exercise needs no plots: without them ranks start in 0.07 s instead of 0.26.
__getattr__ = imported_when_used(__name__, __file__)
