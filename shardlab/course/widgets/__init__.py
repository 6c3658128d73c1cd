"""Controls for notebooks: change something and see its effect at once. Behind each is a plain function.

``workbench`` takes what ``compare`` takes: a workload, or model, data and loss, or a configuration. ``live`` takes the
directory in which ``compare`` writes, ``step_through`` its records, and ``memory_explorer`` a ``MemoryPlan``.

===================  ====================================================  ===============================
in a notebook        what it does                                          in a script
===================  ====================================================  ===============================
memory_explorer      sliders; the planner answers at once                  ``MemoryPlan``
step_through         one recorded step, event by event                     ``events_of_step``, ``ranks_at``
live                 loss, times, memory, timeline while ranks train       ``read_progress``
place_actions        a pipeline's schedule by hand, move by move            ``Board``
workbench            choose, run, watch, compare with earlier runs         ``RunHistory``
===================  ====================================================  ===============================
"""
