"""Small training scripts, right ones and broken ones, that ``shardlab same`` judges: six kinds, one fault in each.

A script is a template of its kind in which lines are replaced. The single process runs the same text.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_BEGIN = """\
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
{imports}

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 11))
"""
_OPTIMIZER = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n"
_ROWS = """\
torch.manual_seed(1 + rank)
for step in range(9):
    for micro in range(4):
        x, y = torch.randint(0, 11, (4, 3)), torch.randint(0, 11, (12,))
"""
_REDUCE = """\
    for param in model.parameters():
        dist.all_reduce(param.grad)
        param.grad /= ranks
"""
_STEP = """\
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
"""
_FSDP1 = 'model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))\n'
_LOSS = "loss = F.cross_entropy(model(x).flatten(0, 1), y) / 4\n"

TEMPLATES: Mapping[str, str] = {
    "by hand": _BEGIN.format(imports="")
    + _OPTIMIZER
    + _ROWS
    + f"        {_LOSS}        loss.backward()\n"
    + _REDUCE
    + _STEP,
    "DDP": _BEGIN.format(imports="from torch.nn.parallel import DistributedDataParallel as DDP")
    + "model = DDP(model)\n"
    + _OPTIMIZER
    + _ROWS
    + "        with nullcontext() if micro == 3 else model.no_sync():\n"
    + f"            {_LOSS}            loss.backward()\n"
    + _STEP,
    "FSDP2": _BEGIN.format(imports="from torch.distributed.fsdp import fully_shard")
    + "fully_shard(model)\n"
    + _OPTIMIZER
    + _ROWS
    + "        model.set_requires_gradient_sync(micro == 3)\n"
    + f"        {_LOSS}        loss.backward()\n"
    + _STEP,
    "FSDP1": _BEGIN.format(imports="from torch.distributed.fsdp import FullyShardedDataParallel")
    + _FSDP1
    + _OPTIMIZER
    + _ROWS
    + "        with nullcontext() if micro == 3 else model.no_sync():\n"
    + f"            {_LOSS}            loss.backward()\n"
    + _STEP.replace("nn.utils.clip_grad_norm_(model.parameters(), 0.1)", "model.clip_grad_norm_(0.1)"),
    "ZeRO": _BEGIN.format(
        imports="from torch.distributed.optim import ZeroRedundancyOptimizer\n"
        "from torch.nn.parallel import DistributedDataParallel as DDP"
    )
    + "model = DDP(model)\n"
    + "optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)\n"
    + _ROWS
    + "        with nullcontext() if micro == 3 else model.no_sync():\n"
    + f"            {_LOSS}            loss.backward()\n"
    + _STEP,
    "ours": _BEGIN.format(imports="from shardlab import Mesh, build_engine")
    + 'mesh = Mesh({"data": ranks})\n'
    + 'engine = build_engine("zero2", model, lambda tensors: torch.optim.SGD(tensors, lr=0.1, momentum=0.9), mesh)\n'
    + _ROWS
    + "        with nullcontext() if micro == 3 else engine.no_sync():\n"
    + f"            {_LOSS.replace('model(x)', 'engine(x)')}            engine.backward(loss)\n"
    + "    engine.clip_grad_norm_(0.1)\n    engine.step()\n    engine.zero_grad()\n",
}

Edit = tuple[str, str]
"""What is replaced, by what."""


@dataclass(frozen=True)
class Story:
    """A change of a script.

    Attributes:
        edits: by kind of script; '*' for all kinds, and kinds that are not named are left out.
        said: a part of the answer that names the cause; of a right one, the word that it begins with.
        ranks: where it can be made.
    """

    edits: Mapping[str, tuple[Edit, ...]]
    said: str
    ranks: tuple[int, ...] = (2, 3)

    def script(self, kind: str) -> str:
        """Its text; empty where it cannot be made in this kind."""
        edits = self.edits.get(kind, self.edits.get("*"))
        if edits is None:
            return ""
        text = TEMPLATES[kind]
        for old, new in edits:
            assert old in text, (kind, old)
            text = text.replace(old, new)
        return text


_HAND, _BOTH, _THREE, _ALL = ("by hand",), ("by hand", "DDP"), ("by hand", "DDP", "FSDP2"), ("*",)


def _story(
    said: str, kinds: tuple[str, ...], *edits: Edit, also: Mapping[str, tuple[Edit, ...]] | None = None, **of: Any
) -> Story:
    """The same edits in some kinds, and others in others."""
    return Story(dict.fromkeys(kinds, edits) | dict(also or {}), said, **of)


def _after(text: str, added: str) -> Edit:
    return text, text + added


def _before(text: str, added: str) -> Edit:
    return text, added + text


_SEED, _SEED_OF_ROWS, _LAST = "torch.manual_seed(0)\n", "torch.manual_seed(1 + rank)\n", "nn.Linear(8, 11))\n"
_CLEAR = "optimizer.zero_grad()\n"
_BACKWARD, _INDENTED = "        loss.backward()\n", "            loss.backward()\n"
_STEPS, _CLIPS = "    optimizer.step()\n", "    nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"
_ALL_REDUCE, _DIVIDE = "        dist.all_reduce(param.grad)\n", "        param.grad /= ranks\n"
_GIVEN = "SGD(model.parameters()"
_ROW, _LABELS = "torch.randint(0, 11, (4, 3))", "torch.randint(0, 11, (12,))"
_MEAN = "F.cross_entropy(model(x).flatten(0, 1), y) / 4"
_TIED = _after(_LAST, "model[3].weight = model[0].weight\n")
_ZERO = (_CLEAR, "model.zero_grad()\n")
_OWNED = (_GIVEN, "SGD(list(model.parameters())[rank::ranks]")
_BY_SUM = _after(
    "model = DDP(model)\n",
    "def added(_, bucket):\n"
    "    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda sent: sent.value()[0])\n\n\n"
    "model.register_comm_hook(None, added)\n",
)
_SKIPS = _before(_STEPS, "    if rank == 1 and step == 1:\n        optimizer.zero_grad()\n        continue\n")
_UNEVEN = _after(_LABELS + "\n", "        y[: 5 * rank + 1] = -100\n")
_OWN_NORM = (
    _CLIPS,
    "    norm = sum(param.grad.to_local().square().sum() for param in model.parameters()) ** 0.5\n"
    "    for param in model.parameters():\n"
    "        param.grad.mul_(min(1.0, 0.1 / float(norm)))\n",
)
_FROM_LOADER = (
    (f"x, y = {_ROW}, {_LABELS}\n", "x, y = next(batches)\n"),
    _after(
        _SEED_OF_ROWS,
        "x, y = torch.randint(0, 11, (144, 4)), torch.randint(0, 11, (144, 4))\n"
        "y[:, :rank] = -100\n"
        "batches = iter(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4))\n",
    ),
)
_COUNTED = (
    _MEAN,
    'F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") * ranks / dist_sum((y != -100).sum()) / 4',
)
_DIST_SUM = _after(_SEED, "\n\ndef dist_sum(number):\n    dist.all_reduce(number)\n    return number\n\n\n")
_OVER_RANKS = (*_FROM_LOADER, _COUNTED, _DIST_SUM)
_LOGS = "    log = loss.detach().clone()\n    dist.all_reduce(log)\n"
_BATCH_NORM = ("nn.Tanh()", "nn.BatchNorm1d(3), nn.Tanh()")
_PAIRS = ((_MEAN, "pairs(model(x)) / 4"), (f"{_ROW}, {_LABELS}", "torch.randint(0, 11, (4, 2)), 0"))
_GATHERED = (
    "\n\ndef pairs(both):\n"
    "    first, second = both.unbind(1)\n"
    "    every = gathered(second)\n"
    "    return F.cross_entropy(first @ every.T, torch.arange(len(first)) + rank * len(first))\n\n\n"
    "def gathered(mine):\n"
)
_NEGATIVES = _after(
    _SEED,
    _GATHERED + "    every = [torch.empty_like(mine) for _ in range(ranks)]\n"
    "    dist.all_gather(every, mine.detach())\n"
    "    every[rank] = mine\n"
    "    return torch.cat(every)\n\n\n",
)
_WITH_GRADIENT = _after(
    _SEED,
    _GATHERED
    + "    from torch.distributed.nn.functional import all_gather\n\n    return torch.cat(all_gather(mine))\n\n\n",
)

BROKEN: Mapping[str, Story] = {
    "not divided by ranks": _story("and not divided", _HAND, (_DIVIDE, ""), also={"DDP": (_BY_SUM,)}),
    "divided by ranks twice": _story("ranks twice", _ALL, ("/ 4\n", "/ 4 / ranks\n")),
    "cleared in each micro-batch": _story(
        "after micro-batch 0, before any optimizer steps them",
        _HAND,
        _before(_BACKWARD, f"        {_CLEAR}"),
        also={
            "DDP": (_before(_INDENTED, f"            {_CLEAR}"),),
            "FSDP2": (("(micro == 3)", "(True)"), _before(_BACKWARD, f"        {_CLEAR}")),
            "FSDP1": (("micro == 3", "True"), _before(_INDENTED, f"            {_CLEAR}")),
        },
    ),
    "inside no_sync() to the end": _story("not reduced", ("DDP", "ZeRO"), ("micro == 3", "micro == 4")),
    "no micro-batch syncs": _story("are not reduced when they are stepped", ("FSDP2",), ("micro == 3", "False")),
    "a last micro-batch that weighs less": _story(
        "rows count otherwise than once",
        ("by hand", "DDP", "FSDP1", "ZeRO"),
        ("/ 4\n", "/ (4 if micro < 3 else 4 * ranks)\n"),
    ),
    "a rank does not clip": _story(
        "does not clip",
        ("by hand", "DDP", "ZeRO"),
        ("    nn.utils.clip", "    if rank == 0:\n        nn.utils.clip"),
    ),
    "weight decays that differ": _story(
        "different options (weight_decay",
        ("by hand", "DDP", "ZeRO"),
        _after("momentum=0.9", ", weight_decay=0.1 * rank"),
    ),
    "only the last micro-batch reduced": _story(
        "is reduced",
        _HAND,
        _before(
            _SEED_OF_ROWS,
            "def reduced(grad):\n"
            "    if micro == 3:\n"
            "        grad = grad.clone()\n"
            "        dist.all_reduce(grad)\n"
            "        grad /= ranks\n"
            "    return grad\n\n\n"
            "for param in model.parameters():\n"
            "    param.register_hook(reduced)\n",
        ),
        (_REDUCE, ""),
    ),
    "reduced in every micro-batch": _story(
        "reduced again",
        _HAND,
        _after(
            _BACKWARD,
            "        for param in model.parameters():\n            dist.all_reduce(param.grad)\n",
        ),
        (_ALL_REDUCE + _DIVIDE, _DIVIDE),
    ),
    "one parameter left out": _story(
        "not reduced",
        _HAND,
        ("in model.parameters():\n        dist", "in list(model.parameters())[:-1]:\n        dist"),
        also={
            "DDP": (
                ("model = DDP(model)", "model = nn.Sequential(DDP(model[:-1]), model[-1])"),
                ("model.no_sync", "model[0].no_sync"),
            )
        },
    ),
    "the module inside is called": _story("not reduced", ("DDP", "ZeRO"), ("model(x)", "model.module(x)")),
    "ranks start different": _story(
        "start different",
        _HAND,
        ("manual_seed(0)", "manual_seed(rank)"),
        also={"DDP": (("manual_seed(0)", "manual_seed(rank)"), ("DDP(model)", "DDP(model, init_sync=False)"))},
    ),
    "a mean of means": _story("a mean of means", _ALL, _UNEVEN),
    "the norm of own pieces": _story(
        "the norm of its own pieces",
        ("FSDP2",),
        _OWN_NORM,
        also={"FSDP1": (("model.clip_grad_norm_(0.1)", "nn.utils.clip_grad_norm_(model.parameters(), 0.1)"),)},
    ),
    "clipped before reduced": _story(
        "clipped before they are reduced", _HAND, (_REDUCE + _STEP, _STEP.replace(_STEPS, _REDUCE + _STEPS))
    ),
    "nobody sends stepped weights": _story("stale weights", _HAND, _OWNED, _ZERO),
    "a rank skips a step": _story("skips a step", _THREE, _SKIPS),
    "all ranks have the same rows": _story("the same rows", _ALL, ("1 + rank", "1")),
    "nothing reaches the loss": _story("a dead run", _ALL, ("/ 4\n", "* 0\n")),
    "not given to the optimizer": _story(
        "no optimizer steps them", _THREE, (_GIVEN, "SGD(list(model.parameters())[1:]")
    ),
    "reduced before the last backward": _story(
        "are reduced: of the others",
        _HAND,
        _after(
            _BACKWARD,
            "        if micro == 2:\n"
            "            for param in model.parameters():\n"
            "                dist.all_reduce(param.grad)\n"
            "                param.grad /= ranks\n",
        ),
        (_REDUCE, ""),
    ),
    "more micro-batches on fewer ranks, undivided": _story(
        "are not divided by the micro-batches", _HAND, ("range(4)", "range(12 // ranks)"), ("/ 4\n", "\n")
    ),
    "a buffer that nobody clears": _story(
        "the step before brought",
        _HAND,
        _before(_SEED_OF_ROWS, "buffers = [torch.zeros_like(one) for one in model.parameters()]\n"),
        (
            _REDUCE,
            "    for param, buffer in zip(model.parameters(), buffers):\n"
            "        buffer += param.grad\n"
            "        dist.all_reduce(buffer)\n"
            "        buffer /= ranks\n"
            "        param.grad.copy_(buffer)\n",
        ),
    ),
    "a tied weight reduced twice": _story(
        "reduced 2 times",
        _HAND,
        _TIED,
        (
            "    for param in model.parameters():\n" + _ALL_REDUCE,
            "    for _, param in model.named_parameters(remove_duplicate=False):\n"
            + _ALL_REDUCE
            + "    for param in model.parameters():\n",
        ),
    ),
    "a layer added after DDP": _story(
        "not reduced", ("DDP",), _after("model = DDP(model)\n", "model.module.append(nn.Linear(11, 11))\n")
    ),
    "over a group of one": _story(
        "not reduced",
        _HAND,
        _after(_SEED, "mine = [dist.new_group([one]) for one in range(ranks)][rank]\n"),
        ("dist.all_reduce(param.grad)", "dist.all_reduce(param.grad, group=mine)"),
    ),
    "by all tokens, and by ranks": _story(
        "ranks twice", _THREE, *_FROM_LOADER, (_MEAN, _COUNTED[1].replace(" * ranks", "")), _DIST_SUM
    ),
    "the loss is averaged, then differentiated": _story(
        "ranks twice",
        _HAND,
        _after("/ 4\n", "        dist.all_reduce(loss)\n        loss = loss / ranks\n"),
        also={"DDP": (_after("/ 4\n", "            dist.all_reduce(loss)\n            loss = loss / ranks\n"),)},
    ),
    "buffers that drift": _story(
        "buffers that drift",
        ("by hand", "FSDP2"),
        _BATCH_NORM,
        also={"DDP": (_BATCH_NORM, ("DDP(model)", "DDP(model, broadcast_buffers=False)"))},
    ),
    "learning rates that differ": _story(
        "different options (lr", ("by hand", "DDP", "ZeRO"), _after("lr=0.1", " * (1 + rank)")
    ),
    "a rank forgets its momentum": _story(
        "the same gradients make another step",
        _THREE,
        _before(_STEPS, "    if rank:\n        optimizer.state.clear()\n"),
    ),
    "stepped weights are overwritten": _story(
        "stale weights",
        _HAND,
        _OWNED,
        _after(_STEPS, "    for param in model.parameters():\n        dist.broadcast(param.data, 0)\n"),
        _ZERO,
    ),
    "frozen on one rank": _story(
        "are frozen on others",
        _HAND,
        _after(_LAST, "model[1].requires_grad_(rank == 0)\n"),
        _before(
            "        dist.all", "        param.grad = torch.zeros_like(param) if param.grad is None else param.grad\n"
        ),
    ),
    "an optimizer made before fully_shard": _story(
        "no module has",
        ("FSDP2",),
        ("fully_shard(model)\n" + _OPTIMIZER, _OPTIMIZER + "fully_shard(model)\n"),
        also={"FSDP1": ((_FSDP1 + _OPTIMIZER, _OPTIMIZER + _FSDP1),)},
    ),
    "divided by one axis of two": _story(
        "an axis of 2 ranks",
        _HAND,
        _after(_SEED, 'mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))\n'),
        (
            _ALL_REDUCE + _DIVIDE,
            '        for axis in ("data", "expert"):\n'
            "            dist.all_reduce(param.grad, group=mesh.get_group(axis))\n"
            '        param.grad /= mesh["data"].size()\n',
        ),
        ranks=(4,),
    ),
    "gathered without a gradient": _story("exchange in forward", _BOTH, _NEGATIVES, *_PAIRS),
    "a group without the last rank": _story(
        "are missing",
        _HAND,
        _after(_SEED, "group = dist.new_group([0, 1][: ranks - 1])\n"),
        ("dist.all_reduce(param.grad)", "dist.all_reduce(param.grad, group=group) if rank + 1 < ranks else None"),
        ranks=(3,),
    ),
}

RIGHT: Mapping[str, Story] = {
    "as it is": _story("SAME", _ALL),
    "uneven rows, counted over ranks": _story("SAME", _THREE, *_OVER_RANKS),
    "uneven micro-batches, each counted over ranks": _story(
        "SAME", _THREE, *_OVER_RANKS, ("y[:, :rank] = -100", "y[torch.arange(144) % 7 > 2, : rank + 1] = -100")
    ),
    "tied": _story("SAME", _ALL, _TIED),
    "unused": _story(
        "SAME",
        ("DDP",),
        ("model = DDP(model)", "model[1].spare = nn.Linear(2, 2)\nmodel = DDP(model, find_unused_parameters=True)"),
    ),
    "checkpointed": _story(
        "SAME",
        _BOTH,
        _after("from torch import nn\n", "from torch.utils.checkpoint import checkpoint\n"),
        ("model(x)", "checkpoint(model, x, use_reentrant=False)"),
    ),
    "bf16": _story("CANNOT BE SAID", _ALL, _before("loss = F", 'with torch.autocast("cpu", torch.bfloat16): ')),
    "a sum, added": _story("SAME", _HAND, ("y) / 4", 'y, reduction="sum")'), (_DIVIDE, "")),
    "gathered with a gradient": _story("SAME", _BOTH, _WITH_GRADIENT, *_PAIRS),
    "BatchNorm under DDP": _story("SAME", ("DDP",), _BATCH_NORM),
    "sent in bfloat16": _story(
        "CANNOT BE SAID",
        _HAND,
        (
            _ALL_REDUCE + _DIVIDE,
            "        small = (param.grad / ranks).bfloat16()\n"
            "        dist.all_reduce(small)\n"
            "        param.grad.copy_(small)\n",
        ),
    ),
    "a group of one beside": _story(
        "SAME",
        ("FSDP2",),
        (
            "fully_shard(model)",
            'mesh = dist.init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("replica", "shard"))\n'
            "fully_shard(model, mesh=mesh)",
        ),
    ),
    "frozen on all ranks": _story("SAME", ("DDP", "FSDP2", "ours"), _after(_LAST, "model[1].requires_grad_(False)\n")),
    "micro-batches divided by ranks": _story(
        "SAME",
        _HAND,
        ("range(4)", "range(12 // ranks)"),
        ("/ 4\n", "/ (12 // ranks)\n"),
        also={
            "DDP": (
                ("range(4)", "range(12 // ranks)"),
                ("/ 4\n", "/ (12 // ranks)\n"),
                ("micro == 3", "micro + 1 == 12 // ranks"),
            )
        },
    ),
    "the mean loss for a log": _story("SAME", _HAND, _before(_REDUCE, _LOGS), also={"DDP": (_before(_STEP, _LOGS),)}),
    "learning rate times ranks": _story("SAME", _ALL, _after("lr=0.1", " * ranks")),
}
