"""How runs are named in a picture, and what must be said about where its numbers come from."""

import pandas as pd

SOURCE_NOTES = {
    "emulated": "emulated link: communication was delayed on purpose",
    "predicted": "predicted by the planner, not run",
}


def source_note(frame: pd.DataFrame) -> str:
    """What a reader must know about emulated or predicted rows; empty where all are measured."""
    notes = []
    for source, note in SOURCE_NOTES.items():
        runs = frame.loc[frame["source"] == source, "run"]
        everywhere = len(runs) == len(frame)
        names = "" if everywhere else f" ({', '.join(str(run) for run in runs.drop_duplicates())})"
        notes += [note + names] if len(runs) else []
    return "; ".join(notes)


def subtitle(frame: pd.DataFrame, text: str = "") -> str:
    """``text`` after the note on the source, if there is one: a narrow figure cuts the end of the line."""
    return joined(source_note(frame), text)


def joined(*parts: str) -> str:
    """The parts of a subtitle that say something."""
    return " · ".join(part for part in parts if part)


def averaged(frame: pd.DataFrame, average: str) -> str:
    """What a value of each run is the ``average`` of: 'median over 2 ranks and 5 steps'; single ones by their number.

    Args:
        frame: rows with ``label``, ``step`` and, where it has ranks, ``rank``.
        average: 'mean' or 'median'.
    """
    names, counts = [], []
    for column in ("rank", "step"):
        if column in frame.columns and len(frame):
            each = frame.groupby("label")[column].nunique()
            one = frame[column].nunique() == 1
            names.append(f"{column} {frame[column].iloc[0]}" if one else f"one {column} each")
            several = f"{each.max()} {column}s" if each.min() == each.max() else f"all {column}s of each"
            counts.append(several if each.max() > 1 else "")
    over = " and ".join(count for count in counts if count)
    single = [name for name, count in zip(names, counts, strict=True) if not count]
    return ", ".join([f"{average} over {over}", *single] if over else single)


def emulated_note(frame: pd.DataFrame) -> str:
    """Whether a link was emulated, of a table that may not say where its numbers come from."""
    if "source" not in frame.columns or not (frame["source"] == "emulated").any():
        return ""
    return SOURCE_NOTES["emulated"]


def listing(parts: list[str]) -> str:
    """'a, b and c'."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else "none"
