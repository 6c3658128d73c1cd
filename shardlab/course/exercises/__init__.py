r"""Work that marks itself: ``check("zero1.owners", my_function)`` runs the function on real ranks.

Whoever writes an exercise of their own gives a task, a starter that does not pass, and cases: for each rank the inputs
and the wanted result. The learner's function gets the communicator and the inputs of its rank. Ten lines are enough:

    from shardlab.course import Case, Exercise, check

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
a ``VirtualClock`` are scored and drawn too. ``shardlab exercises --grade FOLDER --with FILE`` marks a class by the
exercises of a file as well.
"""
