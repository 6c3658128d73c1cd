"""What a learner has done so far, in one JSON file: attempts, hints taken, best score."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from shardlab.exercises.judge import Report, Verdict

VARIABLE = "SHARDLAB_PROGRESS"
SCORE = ("messages", "bytes", "peak_bytes", "time_us")  # in the order in which a better one is looked for


def progress_path() -> Path:
    """``$SHARDLAB_PROGRESS``, else ``shardlab/exercises.json`` in the user's data directory."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen).expanduser()
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data).expanduser() / "shardlab" / "exercises.json"


class Progress:
    """The file; a missing one is an empty one.

    Args:
        path: None for ``progress_path()``.

    Raises:
        ValueError: the file holds something else.
    """

    def __init__(self, path: Path | str | None = None) -> None:
        self.path = progress_path() if path is None else Path(path)
        self._entries = self._read()

    def of(self, name: str) -> dict[str, Any]:
        """``attempts``, ``hints``, ``passed`` and the best score (``SCORE``) of one exercise."""
        return {"attempts": 0, "hints": 0, "passed": False, **self._entries.get(name, {})}

    def add(self, report: Report) -> None:
        """Count an attempt; a blocked one counts for nothing."""
        if report.verdict is Verdict.BLOCKED:
            return
        entry = self.of(report.exercise)
        entry["attempts"] += 1
        if report.verdict is Verdict.PASSED:
            score = report.score
            found = (score.messages, score.num_bytes, score.peak_bytes, score.time_us)
            best = min(found, tuple(entry.get(name, 0) for name in SCORE)) if entry["passed"] else found
            entry |= {"passed": True, **dict(zip(SCORE, best, strict=True))}
        self._write(report.exercise, entry)

    def take_hint(self, name: str, most: int) -> int:
        """Count a hint, up to ``most``, since the last one comes again; the number of those taken before."""
        entry = self.of(name)
        self._write(name, entry | {"hints": min(entry["hints"] + 1, most)})
        return int(entry["hints"])

    def _read(self) -> dict[str, dict[str, Any]]:
        if not self.path.exists():
            return {}
        try:
            entries = json.loads(self.path.read_text())
        except ValueError:
            entries = None
        if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
            raise ValueError(f"progress: {self.path} holds no progress; move it away, or name another file")
        return entries

    def _write(self, name: str, entry: dict[str, Any]) -> None:
        # Read again: another notebook may have written since.
        self._entries = self._read() | {name: entry}
        # Written beside it and renamed: a kernel that dies meanwhile leaves the old file whole.
        beside = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps(self._entries, indent=2) + "\n")
            beside.replace(self.path)
        except OSError as error:  # the verdict stands all the same
            sys.stdout.write(f"Progress was not kept: {error}\n")
