"""What a user gets wrong is one line on stderr and exit code 2, before a rank starts."""

import sys

import pytest
import torch

from shardlab.cli import main
from shardlab.launch import RankPool

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
    "a batch without end": (["--batch", "1000000000000"], ["batch: 1000000000000 is given; at most 10000000"]),
    "a step without end": (["--accumulation", "1000000000000"], ["accumulation: 1000000000000 is given; at most"]),
    "a schedule without end": (
        ["--ranks", "2", "--pipe", "2", "--micro-batches", "1000000000000"],
        ["micro_batches: 1000000000000 is given; at most 10000"],
    ),
    "missing text": (["--text", "nowhere.txt"], ["text", "nowhere.txt cannot be read: No such file", "stdlib"]),
    "a directory as text": (["--text", "used"], ["text", "used cannot be read: Is a directory", "stdlib"]),
    "empty text": (["--text", "empty.txt"], ["text", "empty.txt has 0 bytes"]),
    "short text": (["--text", "short.txt", "--seq-len", "64"], ["text", "short.txt has 10 bytes", "need 65"]),
    "used directory": (["--out", "used"], ["out", "used holds another run", "new or an empty", "--overwrite"]),
    "overwriting what is no run": (["--out", "used", "--overwrite"], ["overwrite", "holds no comparison", "records"]),
    "a file": (["--out", "empty.txt"], ["out", "is a file"]),
    "no such units": (["--strategies", "fsdp", "--wrap", "layers.*"], ["wrap", "'layers.*' matches no", "'blocks.*'"]),
    "no units": (["--strategies", "fsdp", "--wrap", "0"], ["wrap", "'0'", "auto, root", "encoder.*,decoder.*"]),
    "not a number": (["--ranks", "x"], ["--ranks", "integer"]),
    "unknown option": (["--rank", "2"], ["No such option", "--rank"]),
    "adapters": (["--lora", "8"], ["error: lora: no command adds adapters", "--workload FILE.py:NAME"]),
    "an argument": (["four"], ["four"]),
    "half a use": (["--ranks"], ["--ranks"]),
}
if not torch.cuda.is_available():
    CASES["no gpu"] = (["--device", "cuda"], ["device: 'cuda'", "no GPU", "auto, cpu"])


@pytest.fixture
def answer(tmp_path, monkeypatch, capfd):
    """``answer(*words)``: exit code, stdout and stderr of the entry point."""

    def started(pool):
        raise AssertionError("a rank was started")

    def answered(*words):
        monkeypatch.setattr(sys, "argv", ["shardlab", *words])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code, *capfd.readouterr()

    monkeypatch.setattr(RankPool, "start", started)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "short.txt").write_bytes(b"0123456789")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "summary.json").write_text("[]")
    return answered


def test_bad_input_is_one_line_and_exit_code_2(answer):
    for number, (case, (options, words)) in enumerate(CASES.items()):
        code, stdout, stderr = answer("compare", "--out", f"out{number}", *options)
        assert (code, stdout) == (2, ""), case
        assert stderr.startswith("error: ")
        assert len(stderr.splitlines()) == 1
        assert not [word for word in words if word not in stderr], stderr


def test_an_unknown_command_likewise_and_without_one_the_commands_are_shown(answer):
    code, _, stderr = answer("compar")
    assert (code, len(stderr.splitlines())) == (2, 1)
    assert "'compar'" in stderr
    assert "Did you mean 'compare'?" in stderr
    code, stdout, stderr = answer()
    assert code == 2
    assert {"compare", "doctor"} <= set((stdout + stderr).split())
    assert "Traceback" not in stderr
