"""A find as a script that a person can run."""

from dataclasses import fields, is_dataclass
from typing import Any

from tests.fuzzing.pipelines import PipeScenario
from tests.fuzzing.run import Scenario, Verdict

TEMPLATE = """\
# {kind}: {text}
# Run it from the root of the repository: python find.py
from pathlib import Path
import sys

sys.path.insert(0, str(Path.cwd()))
from tests.fuzzing.replay import *  # noqa: E402, F403
{words}
SCENARIO = {scenario}

if __name__ == "__main__":
    replay(SCENARIO)
"""
# Its operations have names that those of one engine have too.
OF_PIPES = "from tests.fuzzing.pipelines import *  # noqa: E402, F403\n"


def script_of(scenario: Scenario, verdict: Verdict) -> str:
    text = verdict.text.splitlines()[0] if verdict.text else ""
    words = OF_PIPES if isinstance(scenario, PipeScenario) else ""
    return TEMPLATE.format(kind=verdict.kind, text=text, words=words, scenario=source(scenario))


def source(value: Any, indent: int = 0) -> str:
    """Plain data as source, without what has its default value; one operation a line."""
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        inner = " " * (indent + 4)
        return "(\n" + "".join(f"{inner}{source(entry, indent + 4)},\n" for entry in value) + " " * indent + ")"
    if not is_dataclass(value) or isinstance(value, type):
        return repr(value)
    given = [
        (field.name, getattr(value, field.name))
        for field in fields(value)
        if getattr(value, field.name) != field.default
    ]
    if not isinstance(value, Scenario):
        return f"{type(value).__name__}({', '.join(f'{name}={source(part, indent)}' for name, part in given)})"
    inner = " " * (indent + 4)
    return "Scenario(\n" + "".join(f"{inner}{name}={source(part, indent + 4)},\n" for name, part in given) + ")"
