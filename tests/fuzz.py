"""The long fuzz: random modules, engines and sequences of what users do, each held against one process of plain torch.

    python tests/fuzz.py --minutes 60                       # all strategies, 1 to 4 ranks; also python -m tests.fuzz
    python tests/fuzz.py --minutes 5 --ranks 2,3 --strategies fsdp,zero3 --seed 7
    python tests/fuzz.py --minutes 10 --peers --keep-going  # torch's own engines, only what they can do
    python tests/fuzz.py --minutes 10 --no-guards           # right programs on engines without guards
    python tests/fuzz.py --minutes 10 --pipes               # pipelines, with our engines inside the stages

Prints a script for each find (as small as Hypothesis could make it, run it with ``python``) and a summary at the end:
how many sequences and operations, of which kinds, what was refused, what was found. Ends with status 1 if something was
found. What is left out for now, and why, stands in ``tests/fuzzing/features.py``.
"""

import argparse
import os
import random
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from shardlab.launch import place
from tests.fuzzing.engines import OURS, PEERS, ROWS
from tests.fuzzing.features import ALL, ON, RIGHT
from tests.fuzzing.hunt import Hunt
from tests.fuzzing.pipelines import INSIDE


def main(arguments: list[str] | None = None) -> int:
    """Parse, hunt, report; the exit status."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch's DDP warns on each of its builds
    hunt = Hunt(_parsed(arguments))
    try:
        hunt.run()
    except KeyboardInterrupt:
        pass  # what was found until then is told
    finally:
        hunt.close()
    sys.stdout.write(hunt.summary())
    return 1 if hunt.finds else 0


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long")
    parser.add_argument("--seed", type=int, default=None, help="of the first round; without it a random one")
    parser.add_argument("--ranks", default="1,2,3,4", help="numbers of ranks, in turns")
    parser.add_argument("--strategies", default=None, help=f"of {','.join((*OURS, *ROWS))}; without it all of them")
    parser.add_argument("--peers", action="store_true", help=f"torch's own engines instead: {','.join(PEERS)}")
    parser.add_argument("--pipes", action="store_true", help="pipelines with these strategies inside their stages")
    parser.add_argument("--features", default=None, help=f"'all', or of {','.join(sorted(ALL))}; without it those on")
    parser.add_argument("--no-guards", action="store_true", help="engines without guards, and only right programs")
    parser.add_argument("--keep-going", action="store_true", help="after a find")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds in one collective that count as a hang")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or auto")
    given = parser.parse_args(arguments)
    try:
        place(1, given.device)
    except ValueError as error:
        parser.error(str(error))
    names = given.strategies.split(",") if given.strategies else PEERS if given.peers else (*OURS, *ROWS)
    on = RIGHT if given.no_guards else ON
    chosen = given.features
    given.features = on if chosen is None else ALL if chosen == "all" else chosen.split(",")
    given.features, given.strategies = frozenset(given.features), tuple(names)
    given.ranks = tuple(int(part) for part in given.ranks.split(",") if int(part) > 1 or not given.pipes)
    if given.pipes and not (given.ranks and {*names} & {*INSIDE}):
        parser.error(f"--pipes takes 2 ranks or more, and strategies of {','.join(INSIDE)}")
    if given.pipes and chosen is not None:
        parser.error("--pipes has none of the features; leave --features out (--no-guards has its effect)")
    given.seed = random.randrange(2**32) if given.seed is None else given.seed
    return given


if __name__ == "__main__":
    sys.exit(main())
