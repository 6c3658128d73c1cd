"""Small training scripts, right ones and broken ones, that ``shardlab same`` judges: six kinds, one fault in each.

A script is a template of its kind in which lines are replaced. The single process runs the same text.
"""

from collections.abc import Mapping
from dataclasses import dataclass

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

Edits = Mapping[str, tuple[tuple[str, str], ...]]
"""By kind of script, what is replaced by what; '*' for all kinds."""


@dataclass(frozen=True)
class Story:
    """A change of a script.

    Attributes:
        edits: see ``Edits``; kinds that it does not name are left out.
        said: a part of the answer that names the cause; of a right one, the word that it begins with.
        ranks: where it can be made.
    """

    edits: Edits
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


_ZERO = ("optimizer.zero_grad()\n", "model.zero_grad()\n")
_BY_SUM = (
    "model = DDP(model)\n",
    "model = DDP(model)\n"
    "def added(_, bucket):\n"
    "    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda sent: sent.value()[0])\n\n\n"
    "model.register_comm_hook(None, added)\n",
)
_SKIPS = (
    "    optimizer.step()\n",
    "    if rank == 1 and step == 1:\n        optimizer.zero_grad()\n        continue\n    optimizer.step()\n",
)
_UNEVEN = ("torch.randint(0, 11, (12,))\n", "torch.randint(0, 11, (12,))\n        y[: 5 * rank + 1] = -100\n")
_OWN_NORM = (
    "    nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n",
    "    norm = sum(param.grad.to_local().square().sum() for param in model.parameters()) ** 0.5\n"
    "    for param in model.parameters():\n"
    "        param.grad.mul_(min(1.0, 0.1 / float(norm)))\n",
)
_FROM_LOADER = (
    ("x, y = torch.randint(0, 11, (4, 3)), torch.randint(0, 11, (12,))\n", "x, y = next(batches)\n"),
    (
        "torch.manual_seed(1 + rank)\n",
        "torch.manual_seed(1 + rank)\n"
        "x, y = torch.randint(0, 11, (144, 4)), torch.randint(0, 11, (144, 4))\n"
        "y[:, :rank] = -100\n"
        "batches = iter(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4))\n",
    ),
)
_COUNTED = (
    "F.cross_entropy(model(x).flatten(0, 1), y) / 4",
    'F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") * ranks / dist_sum((y != -100).sum()) / 4',
)
_DIST_SUM = (
    "torch.manual_seed(0)\n",
    "torch.manual_seed(0)\n\n\ndef dist_sum(number):\n    dist.all_reduce(number)\n    return number\n\n\n",
)

_BATCH_NORM = ("nn.Tanh()", "nn.BatchNorm1d(3), nn.Tanh()")
_PAIRS = (
    ("F.cross_entropy(model(x).flatten(0, 1), y) / 4", "pairs(model(x)) / 4"),
    ("torch.randint(0, 11, (4, 3)), torch.randint(0, 11, (12,))", "torch.randint(0, 11, (4, 2)), 0"),
)
_GATHERED = (
    "torch.manual_seed(0)\n",
    "torch.manual_seed(0)\n\n\n"
    "def pairs(both):\n"
    "    first, second = both.unbind(1)\n"
    "    every = gathered(second)\n"
    "    return F.cross_entropy(first @ every.T, torch.arange(len(first)) + rank * len(first))\n\n\n"
    "def gathered(mine):\n",
)
_NEGATIVES = (
    _GATHERED[0],
    _GATHERED[1] + "    every = [torch.empty_like(mine) for _ in range(ranks)]\n"
    "    dist.all_gather(every, mine.detach())\n"
    "    every[rank] = mine\n"
    "    return torch.cat(every)\n\n\n",
)
_WITH_GRADIENT = (
    _GATHERED[0],
    _GATHERED[1]
    + "    from torch.distributed.nn.functional import all_gather\n\n    return torch.cat(all_gather(mine))\n\n\n",
)

BROKEN: Mapping[str, Story] = {
    "not divided by ranks": Story(
        {"by hand": (("        param.grad /= ranks\n", ""),), "DDP": (_BY_SUM,)}, "and not divided"
    ),
    "divided by ranks twice": Story({"*": (("/ 4\n", "/ 4 / ranks\n"),)}, "ranks twice"),
    "cleared in each micro-batch": Story(
        {
            "by hand": (("        loss.backward()", "        optimizer.zero_grad()\n        loss.backward()"),),
            "DDP": (("            loss.backward()", "            optimizer.zero_grad()\n            loss.backward()"),),
            "FSDP2": (
                ("(micro == 3)", "(True)"),
                ("        loss.backward()", "        optimizer.zero_grad()\n        loss.backward()"),
            ),
            "FSDP1": (
                ("micro == 3", "True"),
                ("            loss.backward()", "            optimizer.zero_grad()\n            loss.backward()"),
            ),
        },
        "after micro-batch 0, before any optimizer steps them",
    ),
    "inside no_sync() to the end": Story(
        dict.fromkeys(("DDP", "ZeRO"), (("micro == 3", "micro == 4"),)), "not reduced"
    ),
    "no micro-batch syncs": Story({"FSDP2": (("micro == 3", "False"),)}, "are not reduced when they are stepped"),
    "a last micro-batch that weighs less": Story(
        dict.fromkeys(("by hand", "DDP", "FSDP1", "ZeRO"), (("/ 4\n", "/ (4 if micro < 3 else 4 * ranks)\n"),)),
        "rows count otherwise than once",
    ),
    "a rank does not clip": Story(
        dict.fromkeys(("by hand", "DDP", "ZeRO"), (("    nn.utils.clip", "    if rank == 0:\n        nn.utils.clip"),)),
        "does not clip",
    ),
    "weight decays that differ": Story(
        dict.fromkeys(("by hand", "DDP", "ZeRO"), (("momentum=0.9", "momentum=0.9, weight_decay=0.1 * rank"),)),
        "different options (weight_decay",
    ),
    "only the last micro-batch reduced": Story(
        {
            "by hand": (
                (
                    "torch.manual_seed(1 + rank)\n",
                    "def reduced(grad):\n"
                    "    if micro == 3:\n"
                    "        grad = grad.clone()\n"
                    "        dist.all_reduce(grad)\n"
                    "        grad /= ranks\n"
                    "    return grad\n\n\n"
                    "for param in model.parameters():\n"
                    "    param.register_hook(reduced)\n"
                    "torch.manual_seed(1 + rank)\n",
                ),
                (_REDUCE, ""),
            )
        },
        "is reduced",
    ),
    "reduced in every micro-batch": Story(
        {
            "by hand": (
                (
                    "        loss.backward()\n",
                    "        loss.backward()\n"
                    "        for param in model.parameters():\n"
                    "            dist.all_reduce(param.grad)\n",
                ),
                ("        dist.all_reduce(param.grad)\n        param.grad /= ranks\n", "        param.grad /= ranks\n"),
            )
        },
        "reduced again",
    ),
    "one parameter left out": Story(
        {
            "by hand": (
                (
                    "    for param in model.parameters():\n        dist",
                    "    for param in list(model.parameters())[:-1]:\n        dist",
                ),
            ),
            "DDP": (
                ("model = DDP(model)", "model = nn.Sequential(DDP(model[:-1]), model[-1])"),
                ("model.no_sync", "model[0].no_sync"),
            ),
        },
        "not reduced",
    ),
    "the module inside is called": Story(
        dict.fromkeys(("DDP", "ZeRO"), (("model(x)", "model.module(x)"),)), "not reduced"
    ),
    "ranks start different": Story(
        {
            "by hand": (("manual_seed(0)", "manual_seed(rank)"),),
            "DDP": (("manual_seed(0)", "manual_seed(rank)"), ("DDP(model)", "DDP(model, init_sync=False)")),
        },
        "start different",
    ),
    "a mean of means": Story({"*": (_UNEVEN,)}, "a mean of means"),
    "the norm of own pieces": Story(
        {
            "FSDP2": (_OWN_NORM,),
            "FSDP1": (("model.clip_grad_norm_(0.1)", "nn.utils.clip_grad_norm_(model.parameters(), 0.1)"),),
        },
        "the norm of its own pieces",
    ),
    "clipped before reduced": Story(
        {"by hand": ((_REDUCE + _STEP, _STEP.replace("    optimizer.step()\n", _REDUCE + "    optimizer.step()\n")),)},
        "clipped before they are reduced",
    ),
    "nobody sends stepped weights": Story(
        {
            "by hand": (("SGD(model.parameters()", "SGD(list(model.parameters())[rank::ranks]"), _ZERO),
        },
        "stale weights",
    ),
    "a rank skips a step": Story({"by hand": (_SKIPS,), "DDP": (_SKIPS,), "FSDP2": (_SKIPS,)}, "skips a step"),
    "all ranks have the same rows": Story({"*": (("1 + rank", "1"),)}, "the same rows"),
    "nothing reaches the loss": Story({"*": (("/ 4\n", "* 0\n"),)}, "a dead run"),
    "not given to the optimizer": Story(
        dict.fromkeys(("by hand", "DDP", "FSDP2"), (("SGD(model.parameters()", "SGD(list(model.parameters())[1:]"),)),
        "no optimizer steps them",
    ),
    "reduced before the last backward": Story(
        {
            "by hand": (
                (
                    "        loss.backward()\n",
                    "        loss.backward()\n"
                    "        if micro == 2:\n"
                    "            for param in model.parameters():\n"
                    "                dist.all_reduce(param.grad)\n"
                    "                param.grad /= ranks\n",
                ),
                (_REDUCE, ""),
            )
        },
        "are reduced: of the others",
    ),
    "a tied weight reduced twice": Story(
        {
            "by hand": (
                ("nn.Linear(8, 11))\n", "nn.Linear(8, 11))\nmodel[3].weight = model[0].weight\n"),
                (
                    "    for param in model.parameters():\n        dist.all_reduce(param.grad)\n",
                    "    for _, param in model.named_parameters(remove_duplicate=False):\n"
                    "        dist.all_reduce(param.grad)\n"
                    "    for param in model.parameters():\n",
                ),
            )
        },
        "reduced 2 times",
    ),
    "a layer added after DDP": Story(
        {"DDP": (("model = DDP(model)\n", "model = DDP(model)\nmodel.module.append(nn.Linear(11, 11))\n"),)},
        "not reduced",
    ),
    "over a group of one": Story(
        {
            "by hand": (
                (
                    "torch.manual_seed(0)\n",
                    "torch.manual_seed(0)\nmine = [dist.new_group([one]) for one in range(ranks)][rank]\n",
                ),
                ("dist.all_reduce(param.grad)", "dist.all_reduce(param.grad, group=mine)"),
            )
        },
        "not reduced",
    ),
    "by all tokens, and by ranks": Story(
        dict.fromkeys(
            ("by hand", "DDP", "FSDP2"),
            (*_FROM_LOADER, (_COUNTED[0], _COUNTED[1].replace(" * ranks", "")), _DIST_SUM),
        ),
        "ranks twice",
    ),
    "the loss is averaged, then differentiated": Story(
        {"by hand": (("/ 4\n", "/ 4\n        dist.all_reduce(loss)\n        loss = loss / ranks\n"),)}
        | {"DDP": (("/ 4\n", "/ 4\n            dist.all_reduce(loss)\n            loss = loss / ranks\n"),)},
        "ranks twice",
    ),
    "buffers that drift": Story(
        {
            "by hand": (_BATCH_NORM,),
            "FSDP2": (_BATCH_NORM,),
            "DDP": (_BATCH_NORM, ("DDP(model)", "DDP(model, broadcast_buffers=False)")),
        },
        "buffers that drift",
    ),
    "learning rates that differ": Story(
        dict.fromkeys(("by hand", "DDP", "ZeRO"), (("lr=0.1", "lr=0.1 * (1 + rank)"),)), "different options (lr"
    ),
    "a rank forgets its momentum": Story(
        dict.fromkeys(
            ("by hand", "DDP", "FSDP2"),
            (("    optimizer.step()\n", "    if rank:\n        optimizer.state.clear()\n    optimizer.step()\n"),),
        ),
        "the same gradients make another step",
    ),
    "stepped weights are overwritten": Story(
        {
            "by hand": (
                ("SGD(model.parameters()", "SGD(list(model.parameters())[rank::ranks]"),
                (
                    "    optimizer.step()\n",
                    "    optimizer.step()\n"
                    "    for param in model.parameters():\n"
                    "        dist.broadcast(param.data, 0)\n",
                ),
                _ZERO,
            )
        },
        "stale weights",
    ),
    "frozen on one rank": Story(
        {
            "by hand": (
                ("nn.Linear(8, 11))\n", "nn.Linear(8, 11))\nmodel[1].requires_grad_(rank == 0)\n"),
                (
                    "        dist.all",
                    "        param.grad = torch.zeros_like(param) if param.grad is None else param.grad\n"
                    "        dist.all",
                ),
            )
        },
        "are frozen on others",
    ),
    "an optimizer made before fully_shard": Story(
        {
            "FSDP2": (("fully_shard(model)\n" + _OPTIMIZER, _OPTIMIZER + "fully_shard(model)\n"),),
            "FSDP1": ((_FSDP1 + _OPTIMIZER, _OPTIMIZER + _FSDP1),),
        },
        "no module has",
    ),
    "divided by one axis of two": Story(
        {
            "by hand": (
                (
                    "torch.manual_seed(0)\n",
                    "torch.manual_seed(0)\n"
                    'mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))\n',
                ),
                (
                    "        dist.all_reduce(param.grad)\n        param.grad /= ranks\n",
                    '        for axis in ("data", "expert"):\n'
                    "            dist.all_reduce(param.grad, group=mesh.get_group(axis))\n"
                    '        param.grad /= mesh["data"].size()\n',
                ),
            )
        },
        "an axis of 2 ranks",
        (4,),
    ),
    "gathered without a gradient": Story(
        dict.fromkeys(("by hand", "DDP"), (_NEGATIVES, *_PAIRS)),
        "exchange in forward",
    ),
    "a group without the last rank": Story(
        {
            "by hand": (
                ("torch.manual_seed(0)\n", "torch.manual_seed(0)\ngroup = dist.new_group([0, 1][: ranks - 1])\n"),
                (
                    "dist.all_reduce(param.grad)",
                    "dist.all_reduce(param.grad, group=group) if rank + 1 < ranks else None",
                ),
            )
        },
        "are missing",
        (3,),
    ),
}

RIGHT: Mapping[str, Story] = {
    "as it is": Story({"*": ()}, "SAME"),
    "uneven rows, counted over ranks": Story(
        {
            "by hand": (*_FROM_LOADER, _COUNTED, _DIST_SUM),
            "DDP": (*_FROM_LOADER, _COUNTED, _DIST_SUM),
            "FSDP2": (*_FROM_LOADER, _COUNTED, _DIST_SUM),
        },
        "SAME",
    ),
    "tied": Story({"*": (("nn.Linear(8, 11))\n", "nn.Linear(8, 11))\nmodel[3].weight = model[0].weight\n"),)}, "SAME"),
    "unused": Story(
        {
            "DDP": (
                (
                    "model = DDP(model)",
                    "model[1].spare = nn.Linear(2, 2)\nmodel = DDP(model, find_unused_parameters=True)",
                ),
            )
        },
        "SAME",
    ),
    "checkpointed": Story(
        dict.fromkeys(
            ("by hand", "DDP"),
            (
                ("from torch import nn\n", "from torch import nn\nfrom torch.utils.checkpoint import checkpoint\n"),
                ("model(x)", "checkpoint(model, x, use_reentrant=False)"),
            ),
        ),
        "SAME",
    ),
    "bf16": Story({"*": (("loss = F", 'with torch.autocast("cpu", torch.bfloat16): loss = F'),)}, "CANNOT BE SAID"),
    "a sum, added": Story(
        {"by hand": (("y) / 4", 'y, reduction="sum")'), ("        param.grad /= ranks\n", ""))}, "SAME"
    ),
    "gathered with a gradient": Story(
        dict.fromkeys(("by hand", "DDP"), (_WITH_GRADIENT, *_PAIRS)),
        "SAME",
    ),
    "BatchNorm under DDP": Story({"DDP": (_BATCH_NORM,)}, "SAME"),
    "sent in bfloat16": Story(
        {
            "by hand": (
                (
                    "        dist.all_reduce(param.grad)\n        param.grad /= ranks\n",
                    "        small = (param.grad / ranks).bfloat16()\n"
                    "        dist.all_reduce(small)\n"
                    "        param.grad.copy_(small)\n",
                ),
            )
        },
        "CANNOT BE SAID",
    ),
    "a group of one beside": Story(
        {
            "FSDP2": (
                (
                    "fully_shard(model)",
                    'mesh = dist.init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("replica", "shard"))\n'
                    "fully_shard(model, mesh=mesh)",
                ),
            )
        },
        "SAME",
    ),
    "frozen on all ranks": Story(
        dict.fromkeys(
            ("DDP", "FSDP2", "ours"), (("nn.Linear(8, 11))\n", "nn.Linear(8, 11))\nmodel[1].requires_grad_(False)\n"),)
        ),
        "SAME",
    ),
    "micro-batches divided by ranks": Story(
        {
            "by hand": (("range(4)", "range(12 // ranks)"), ("/ 4\n", "/ (12 // ranks)\n")),
            "DDP": (
                ("range(4)", "range(12 // ranks)"),
                ("/ 4\n", "/ (12 // ranks)\n"),
                ("micro == 3", "micro + 1 == 12 // ranks"),
            ),
        },
        "SAME",
    ),
    "the mean loss for a log": Story(
        {
            "by hand": ((_REDUCE, "    log = loss.detach().clone()\n    dist.all_reduce(log)\n" + _REDUCE),),
            "DDP": ((_STEP, "    log = loss.detach().clone()\n    dist.all_reduce(log)\n" + _STEP),),
        },
        "SAME",
    ),
    "learning rate times ranks": Story({"*": (("lr=0.1", "lr=0.1 * ranks"),)}, "SAME"),
}
