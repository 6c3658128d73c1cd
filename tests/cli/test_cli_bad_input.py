"""What a user gets wrong is one line on stderr and exit code 2, before a rank starts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent

# One process imports torch once and forks for each command line: every case is the real entry point all the same.
RUNNER = """
import json, os, sys
import shardlab.experiment
from shardlab.cli import main
from shardlab.launch import RankPool

RankPool.start = lambda self: sys.exit("a rank was started")
answers = []
for place, arguments in enumerate(json.loads(sys.argv[1])):
    files = [f"{place}.{name}" for name in ("out", "err")]
    if (child := os.fork()) == 0:
        for fd, name in enumerate(files, 1):
            os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY), fd)
        sys.argv = ["shardlab", *arguments]
        try:
            main()
        except SystemExit as end:  # not through the interpreter's shutdown, which torch makes slow
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(end.code)
        os._exit(99)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    answers.append([code, *(open(name).read() for name in files)])
print(json.dumps(answers))
"""
CASES = {  # options, and words of what is said; each field's own refusals are those of CompareConfig
    "unknown strategy": (["--strategies", "ddp,zero9"], ["strategies", "'zero9'", "single", "bucketed", "zero1"]),
    "no strategy": (["--strategies", ","], ["strategies", "at least one"]),
    "no such link": (["--link", "fast"], ["link", "'fast'", "10Gbps,50us"]),
    "no ranks": (["--ranks", "0"], ["ranks", "0 is below 1"]),
    "many ranks": (["--ranks", "99999999999"], ["ranks", "99999999999", "at most 1024"]),
    "many ranks in groups": (
        ["--ranks", "99999999999", "--strategies", "fsdp", "--sharding", "hybrid_shard"],
        ["ranks: 99999999999 was"],
    ),
    "batch does not divide": (["--ranks", "3", "--batch", "10"], ["batch", "10", "a multiple of 3"]),
    "missing text": (["--text", "nowhere.txt"], ["text", "there is no file", "nowhere.txt", "stdlib"]),
    "a directory as text": (["--text", "used"], ["text", "used is a directory", "stdlib"]),
    "empty text": (["--text", "empty.txt"], ["text", "empty.txt is empty"]),
    "short text": (["--text", "short.txt", "--seq-len", "64"], ["text", "short.txt has 10 bytes", "need 65"]),
    "used directory": (["--out", "used"], ["out", "used holds another run", "new or an empty", "--overwrite"]),
    "overwriting what is no run": (["--out", "used", "--overwrite"], ["overwrite", "holds no comparison", "records"]),
    "a file": (["--out", "empty.txt"], ["out", "is a file"]),
    "no such units": (["--strategies", "fsdp", "--wrap", "layers.*"], ["wrap", "'layers.*' matches no", "'blocks.*'"]),
    "no units": (["--strategies", "fsdp", "--wrap", "0"], ["wrap", "'0'", "auto, root", "encoder.*,decoder.*"]),
    "not a number": (["--ranks", "x"], ["--ranks", "integer"]),
    "unknown option": (["--rank", "2"], ["No such option", "--rank"]),
    "an argument": (["four"], ["four"]),
    "half a use": (["--ranks"], ["--ranks"]),
}
if not torch.cuda.is_available():
    CASES["no gpu"] = (["--device", "cuda"], ["device: 'cuda'", "no GPU", "auto, cpu"])


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Exit code, stdout and stderr of each case."""
    place = tmp_path_factory.mktemp("bad")
    (place / "empty.txt").write_bytes(b"")
    (place / "short.txt").write_bytes(b"0123456789")
    (place / "used").mkdir()
    (place / "used" / "summary.json").write_text("[]")
    lines = [["compare", "--out", f"out{number}", *options] for number, (options, _) in enumerate(CASES.values())]
    lines += [["compar"], []]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    command = [sys.executable, "-c", RUNNER, json.dumps(lines)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=place, env=environment, check=True)
    return dict(zip([*CASES, "unknown command", "nothing"], json.loads(done.stdout), strict=True))


def test_bad_input_is_one_line_and_exit_code_2(answers):
    for case, (_, words) in CASES.items():
        code, stdout, stderr = answers[case]
        assert (code, stdout) == (2, ""), case
        assert stderr.startswith("error: ")
        assert len(stderr.splitlines()) == 1
        assert not [word for word in words if word not in stderr], stderr


def test_an_unknown_command_likewise_and_without_one_the_commands_are_shown(answers):
    code, _, stderr = answers["unknown command"]
    assert (code, len(stderr.splitlines())) == (2, 1)
    assert "'compar'" in stderr
    assert "Did you mean 'compare'?" in stderr
    code, stdout, stderr = answers["nothing"]
    assert code == 2
    assert "compare" in stdout + stderr
    assert "doctor" in stdout + stderr
    assert "Traceback" not in stderr
