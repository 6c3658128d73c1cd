"""Every strategy and layout with every nasty module equals one process, in float64 to 1e-10.

Engines that store otherwise meet all of them, or by turns a half where another of their kind meets the others; what is
cut in other ways meets the modules of which the shape matters. One call of a pool trains all cases of a strategy, so
that the matrix stays quick; each case that fails is named.
"""

import pytest
import torch.distributed as dist

from shardlab.comm.mesh import Mesh
from shardlab.units import wrapped_modules
from shardlab.units.structure import called_modules
from tests.dist import nasty
from tests.dist.every_engine import ALL, CUT_OTHERWISE, ENGINES, OTHER_CUTS, axes_of, engine_of

KEYS = [key for key in (*ENGINES, *OTHER_CUTS) if key.count("-") < 2 and "-one" not in key]
SHAPES = ("fewer rows than ranks", "parameters in containers", "no elements")  # where it matters how they are cut


def is_too_small(module, options):
    """Whether no part of it is of the size that a unit shall have."""
    sizes = [sum(param.numel() for param in part.parameters()) for part in called_modules(module).values()]
    return max(sizes, default=0) < options.get("wrap", 0)


def train_all(rank, key, num_ranks, names):
    with Mesh(axes_of(key, num_ranks)) as mesh:
        return {name: train(key, mesh, num_ranks, name, guards=bool(place % 2)) for place, name in enumerate(names)}


def train(key, mesh, num_ranks, name, guards):
    case = nasty.CASES[name]
    options = dict(ALL[key][1]) if key != "fsdp" or num_ranks == 3 else {"wrap": 50, "prefetch": 0}  # units by size
    if key.startswith("fsdp") and is_too_small(case.build(), options):
        options = {**options, "wrap": "root"}
    options |= {"guards": guards, "mesh": mesh, "optimizer_fn": nasty.optimizer}
    model = case.build(seed=dist.get_rank())  # ranks that start different must end equal
    try:
        with engine_of(key, num_ranks, model, **options) as engine:
            return nasty.train(case, engine)
    except Exception as error:
        error.add_note(f"in the case {name!r}")
        raise


def difference(state, expected):
    """The largest over all tensors."""
    assert state.keys() == expected.keys()
    return max(float((state[name] - value).abs().max()) for name, value in expected.items() if value.numel())


# At 3 ranks, which divide little; units by size at 2.
IN_FULL = [("bucketed", 3), ("zero1", 3), ("zero3", 3), ("fsdp", 3)]
PLACES = [("fsdp", 2), *((key, 4 if "hybrid" in key else 3) for key in KEYS)]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of checkpoints in a checkpoint
@pytest.mark.parametrize(("key", "num_ranks"), PLACES)
def test_every_case_equals_one_process(pools, key, num_ranks):
    names = tuple(nasty.CASES)
    if key in (*OTHER_CUTS, *CUT_OTHERWISE):
        names = (SHAPES[KEYS.index(key) % len(SHAPES)],)
    elif (key, num_ranks) not in IN_FULL:
        names = names[PLACES.index((key, num_ranks)) % 2 :: 2]
    for rank, states in enumerate(pools(num_ranks).run(train_all, key, num_ranks, names)):
        found = {name: difference(state, nasty.reference(name, num_ranks)) for name, state in states.items()}
        assert tuple(found) == names
        assert not {name: by for name, by in found.items() if not by <= 1e-10}, f"rank {rank}"


def test_containers_are_never_units():
    """A list of modules or parameters is not called, so no hook would gather for it."""
    for policy in ("auto", 1, 72, lambda name, module: True):
        assert "blocks" not in wrapped_modules(nasty.CASES["used twice"].build(), policy)
    assert wrapped_modules(nasty.CASES["parameters in containers"].build()) == {}
