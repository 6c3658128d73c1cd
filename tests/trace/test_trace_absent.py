"""Delete ``shardlab/trace`` and every engine still trains."""

import subprocess
import sys
from pathlib import Path

CODE = """
import sys
sys.modules["shardlab.trace"] = None   # importing it, or anything in it, now fails
import torch
from shardlab.comm.mesh import Mesh
from shardlab.engines import STRATEGIES, build_engine

losses = {}
for name in (name for name in STRATEGIES if not name.startswith("torch_")):  # torch's own need ranks
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    with build_engine(name, model, lambda tensors: torch.optim.AdamW(tensors, lr=0.01), Mesh.alone()) as engine:
        losses[name] = []
        for _ in range(3):
            loss = engine(torch.ones(4, 3)).square().mean()
            engine.backward(loss)
            engine.step()
            engine.zero_grad()
            losses[name].append(float(loss.detach()))
assert len({tuple(values) for values in losses.values()}) == 1, losses
assert losses["single"][-1] < losses["single"][0]
try:
    import shardlab.trace.recorder
except ModuleNotFoundError:
    print("trained without", len(losses))
"""


def test_engines_train_without_the_recorder():
    root = Path(__file__).parent.parent.parent
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("trained without")
