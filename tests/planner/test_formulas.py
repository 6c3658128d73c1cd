"""Bytes at rest and elements on the wire against the formulas of the papers, with padding stated."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.partition import ParamSpec
from shardlab.planner import PRECISIONS, PlannedModel, Setup, predicted_collectives, predicted_memory
from shardlab.planner.groups import groups_of
from shardlab.planner.memory import bytes_at_rest
from shardlab.vocabulary import FLAG, Collective, MeshAxis, Role
from tests.oracle.collectives import backward_order, calls_of_step, counted_collectives

NUM_BLOCKS = 3


def blocks_model(rows: int = 12) -> tuple[PlannedModel, dict[str, list[str]]]:
    """Three blocks between an embedding and a head; every size is a multiple of ``rows``."""
    specs = [ParamSpec("embedding", (rows, 5), 4)]
    units = {}
    for block in range(NUM_BLOCKS):
        own = [ParamSpec(f"blocks.{block}.weight", (rows, 7), 4), ParamSpec(f"blocks.{block}.bias", (rows,), 4)]
        units[f"blocks.{block}"] = [spec.name for spec in own]
        specs += own
    return PlannedModel.of_specs([*specs, ParamSpec("head", (rows, 2), 4)]), units


def fsdp(num_ranks, units, **options):
    return Setup("fsdp", num_ranks, units=units, **options)


def at_rest(model, setup, rank=0):
    return bytes_at_rest(groups_of(model, setup), setup, rank)


def sent(model, setup):
    """The collectives of a step, without the flags of one number by which ranks raise together."""
    return [call for call in calls_of_step(model, setup) if call.tag != FLAG]


def wire_elements(model, setup, rank=0):
    """Elements that a rank sends in a step."""
    frame = counted_collectives(model, setup, ranks=[rank]).query("tag != @FLAG")
    return float((frame["wire_bytes"] / (frame["bytes"] / frame["numel"])).sum())


@pytest.mark.parametrize("layout", ["flat", "dim0"])
def test_bytes_at_rest_are_the_formulas_where_ranks_divide_all_sizes(layout):
    model, units = blocks_model()
    for num_ranks in (2, 3, 4):
        whole, part = 4 * model.numel, 4 * model.numel // num_ranks
        expected = {
            ("ddp", ""): (whole, whole, 2 * whole),
            ("bucketed", ""): (whole, whole, 2 * whole),
            ("zero1", ""): (whole, whole, 2 * part),
            ("zero2", ""): (whole, part, 2 * part),
            ("zero3", ""): (part, part, 2 * part),
            ("fsdp", "full_shard"): (part, part, 2 * part),
            ("fsdp", "shard_grad_op"): (part, part, 2 * part),
            ("fsdp", "no_shard"): (whole, whole, 2 * whole),
        }
        for (strategy, sharding), sizes in expected.items():
            setup = Setup(strategy, num_ranks, units=units, layout=layout, sharding=sharding or "full_shard")
            for rank in range(num_ranks):
                held = at_rest(model, setup, rank)
                assert (held[Role.PARAMETER], held[Role.GRADIENT], held[Role.OPTIMIZER_STATE]) == sizes, strategy


def test_hybrid_shards_over_its_group_only():
    model, units = blocks_model()
    for layout in ("flat", "dim0"):
        setup = fsdp(6, units, sharding="hybrid_shard", shard_group_size=3, layout=layout)
        for rank in range(6):
            held = at_rest(model, setup, rank)
            assert held[Role.PARAMETER] == held[Role.GRADIENT] == 4 * model.numel // 3
            assert held[Role.OPTIMIZER_STATE] == 8 * model.numel // 3
    for size, axes in ((1, {"replica"}), (6, {"shard"})):  # a group of one sends nothing
        setup = fsdp(6, units, sharding="hybrid_shard", shard_group_size=size)
        assert {str(call.axis) for call in sent(model, setup)} == axes


def specs_of(shapes):
    return [ParamSpec(f"p{index}", shape, 4) for index, shape in enumerate(shapes)]


SHAPES = st.lists(st.lists(st.integers(1, 6), max_size=2).map(tuple), min_size=1, max_size=8)


@given(
    SHAPES, st.integers(1, 5), st.sampled_from(["zero1", "zero2", "zero3", "fsdp"]), st.sampled_from(["flat", "dim0"])
)
@settings(deadline=None)
def test_what_ranks_hold_adds_up_to_the_model_and_stated_padding(shapes, num_ranks, strategy, layout):
    model = PlannedModel.of_specs(specs_of(shapes))
    units = {"block": ["p0"]}
    setup = Setup(strategy, num_ranks, units=units, layout=layout, bucket_bytes=64)
    groups = groups_of(model, setup)
    held = [bytes_at_rest(groups, setup, rank) for rank in range(num_ranks)]
    padding = 4 * sum(group.layout.padding_numel for group in groups)
    padded = 4 * model.numel + padding
    copies = {"zero1": (num_ranks, num_ranks), "zero2": (num_ranks, 1)}.get(strategy, (1, 1))
    assert sum(of_rank[Role.PARAMETER] for of_rank in held) == copies[0] * padded
    assert sum(of_rank[Role.GRADIENT] for of_rank in held) == copies[1] * padded
    assert sum(of_rank[Role.OPTIMIZER_STATE] for of_rank in held) == 8 * model.numel  # never for padding
    if layout == "flat" or strategy != "fsdp":
        assert padding < 4 * num_ranks * len(groups)


def test_elements_on_the_wire_are_the_formulas():
    model, units = blocks_model()
    for num_ranks in (2, 3, 4, 6):
        share = Fraction(num_ranks - 1, num_ranks)
        volumes = {"ddp": 2, "bucketed": 2, "zero1": 2, "zero2": 2, "zero3": 3, "fsdp": 3}
        setups = [(Setup(name, num_ranks, units=units), number) for name, number in volumes.items()]
        for sharding, number in {"full_shard": 3, "shard_grad_op": 2, "no_shard": 2}.items():
            for layout in ("flat", "dim0"):
                setups.append((fsdp(num_ranks, units, sharding=sharding, layout=layout), number))
        for setup, number in setups:
            sent = wire_elements(model, setup)
            assert sent == pytest.approx(float(number * model.numel * share), rel=1e-12), setup


def test_hybrid_sends_three_volumes_in_the_group_and_reduces_the_shard_across_replicas():
    model, units = blocks_model()
    setup = fsdp(6, units, sharding="hybrid_shard", shard_group_size=3, micro_batches=2, clip=True)
    calls = sent(model, setup)
    by_axis = {axis: [call for call in calls if call.axis == axis] for axis in (MeshAxis.SHARD, MeshAxis.REPLICA)}
    ops = Counter(call.op for call in by_axis[MeshAxis.SHARD])
    assert ops == {Collective.ALL_GATHER: 16, Collective.REDUCE_SCATTER: 4, Collective.ALL_REDUCE: 1}
    gathered = sum(call.numel for call in calls if call.op == Collective.ALL_GATHER)
    reduced = sum(call.numel for call in calls if call.op == Collective.REDUCE_SCATTER)
    assert (gathered, reduced) == (4 * model.numel, model.numel)  # 2M and 1 volumes
    assert {call.group_size for call in by_axis[MeshAxis.SHARD]} == {3}
    across = by_axis[MeshAxis.REPLICA]
    assert {(call.op, call.group_size) for call in across} == {(Collective.ALL_REDUCE, 2)}
    assert sum(call.numel for call in across) == model.numel // 3  # P / S
    reductions = [call for call in calls if call.tag.startswith("gradients")]
    assert [(call.axis, call.tag) for call in reductions] == [
        (axis, f"gradients of {unit}") for unit in (*reversed(units), "root") for axis in ("shard", "replica")
    ]
    assert len(by_axis[MeshAxis.SHARD]) + len(across) == len(calls)


def test_counts_of_collectives_with_micro_batches():
    model, units = blocks_model()
    num_units = NUM_BLOCKS + 1
    gather, scatter = Collective.ALL_GATHER, Collective.REDUCE_SCATTER
    for number in (1, 2, 5):

        def counts(strategy, number=number, **options):
            setup = Setup(strategy, 4, units=units if strategy == "fsdp" else {}, micro_batches=number, **options)
            return Counter(call.op for call in sent(model, setup)), len(groups_of(model, setup))

        assert counts("fsdp")[0] == {gather: 2 * num_units * number, scatter: num_units}
        assert counts("fsdp", sharding="shard_grad_op")[0] == {gather: num_units * number, scatter: num_units}
        assert counts("fsdp", sharding="no_shard")[0] == {Collective.ALL_REDUCE: num_units}
        found, num_buckets = counts("zero3", bucket_bytes=400)
        assert num_buckets > 1
        assert found == {gather: 2 * num_buckets * number, scatter: num_buckets}
        assert counts("zero2", bucket_bytes=400)[0] == {gather: num_buckets, scatter: num_buckets}


def test_order_of_an_fsdp_step():
    model, units = blocks_model()
    names = ["root", "blocks.0", "blocks.1", "blocks.2"]
    calls = sent(model, fsdp(2, units, prefetch=0, clip=True))
    assert [call.tag for call in calls] == [
        *(f"parameters of {name}" for name in names),
        "parameters of root",
        *(f"{kind} of blocks.{block}" for block in (2, 1, 0) for kind in ("parameters", "gradients")),
        "gradients of root",
        "gradient norm",
    ]
    assert [call.phase for call in calls] == ["forward"] * 4 + ["backward"] * 8 + ["clip"]
    norm = calls[-1]
    assert (norm.op, norm.dtype, norm.numel, norm.itemsize) == ("all_reduce", "float64", 1, 8)


def short(units, root, prefetch):
    return " ".join(f"{verb[0]}{name}" for verb, name in backward_order(units, root, prefetch))


def test_prefetch_moves_gathers_forward_and_nothing_else():
    assert short("123", "0", 0) == "g0 g3 r3 g2 r2 g1 r1 r0"
    assert short("123", "0", 1) == "g0 g3 g2 r3 g1 r2 r1 r0"
    assert short("123", "0", 2) == "g0 g3 g2 g1 r3 r2 r1 r0"
    assert short("123", None, 1) == "g3 g2 r3 g1 r2 r1"
    assert short("", "0", 1) == "g0 r0"


@given(st.integers(0, 8), st.booleans(), st.integers(0, 10))
def test_every_unit_is_gathered_before_it_is_reduced_and_never_too_early(num_units, has_root, prefetch):
    units = [str(unit) for unit in range(1, num_units + 1)]
    order = list(backward_order(units, "0" if has_root else None, prefetch))
    names = units + ["0"] * has_root
    assert sorted(order) == sorted((verb, name) for verb in ("gather", "reduce") for name in names)
    alive = set()
    for verb, name in order:
        if verb == "gather":
            alive.add(name)
        else:
            assert name in alive
            alive.remove(name)
        assert len(alive - {"0"}) <= 1 + prefetch  # the root stays until the end


def test_mixed_precision_counts_16_bit_in_the_ranks_and_fp32_in_the_shards():
    model, units = blocks_model()
    setup = fsdp(4, units, precision=PRECISIONS["mixed"])
    held, part = at_rest(model, setup), model.numel // 4
    assert [held[role] for role in (Role.PARAMETER, Role.GRADIENT, Role.MASTER_WEIGHT, Role.OPTIMIZER_STATE)] == [
        2 * part, 2 * part, 4 * part, 8 * part,
    ]  # fmt: skip
    assert {(call.dtype, call.itemsize) for call in sent(model, setup)} == {("bfloat16", 2)}
    zero1 = at_rest(model, Setup("zero1", 4, precision=PRECISIONS["mixed"]))
    assert (zero1[Role.PARAMETER], zero1[Role.MASTER_WEIGHT]) == (2 * model.numel, 4 * part)


def test_bad_setups_name_the_field():
    for options, message in (
        ({"strategy": "zero4"}, "strategy: 'zero4' is not one of single, ddp"),
        ({"layout": "rows"}, "layout: 'rows' is not one of flat, dim0"),
        ({"sharding": "some"}, "sharding: 'some' is not one of full_shard"),
        ({"partition": "half"}, "partition: 'half' is not one of elements"),
        ({"partition": "balanced", "layout": "dim0"}, "partition: 'balanced' gives ranks whole parameters"),
        ({"partition": "balanced", "sharding": "no_shard"}, "partition: 'balanced' gives ranks whole parameters"),
        ({"num_ranks": 0}, "num_ranks: 0 is too small; it must be at least 1"),
        ({"prefetch": -1}, "prefetch: -1 is too small; it must be at least 0"),
        ({"strategy": "single"}, "num_ranks: 4 is given; 'single' trains in one process"),
        ({"sharding": "hybrid_shard", "shard_group_size": 3}, "shard_group_size: 3 .*; it must divide the 4 ranks"),
        ({"compute_dtype": "int8"}, "compute_dtype: 'int8' is not one of bfloat16"),
        ({"shard_group_size": 2}, "shard_group_size: 2 is given; only fsdp with hybrid_shard"),
    ):
        with pytest.raises(ValueError, match=message):
            Setup(**{"strategy": "fsdp", "num_ranks": 4, **options})


def test_bad_models_units_and_ranks_name_the_field():
    model, units = blocks_model()
    with pytest.raises(ValueError, match="units: no parameter is called nothing"):
        predicted_memory(model, fsdp(2, {"u": ["nothing"]}))
    with pytest.raises(ValueError, match=r"units: blocks\.0\.bias is in more than one unit"):
        predicted_memory(model, fsdp(2, {**units, "u": ["blocks.0.bias"]}))
    with pytest.raises(ValueError, match="units: 'root' is the name of the unit of all other"):
        predicted_memory(model, fsdp(2, {"root": ["head"]}))
    with pytest.raises(ValueError, match="rank: 2 is not one of the 2 ranks; it must be 0 to 1"):
        predicted_collectives(model, fsdp(2, units), ranks=[2])
    with pytest.raises(ValueError, match="head come twice; names must differ"):
        PlannedModel.of_specs([ParamSpec("head", (1,), 4)] * 2)
