"""Wholes from pieces, the union of ranks' rows, and coefficients, on numbers made by hand; and ``watch`` on ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from shardlab.launch import RankError
from shardlab.recording.global_hooks import replaced
from shardlab.same import watch
from shardlab.same.answer import answer, early
from shardlab.same.capture import Capture, drops_nothing
from shardlab.same.coefficients import meaning, mixture
from shardlab.same.notes import Backward, Call, Cleared, Counted, Message, Notes, Part, Step, UnlikeError
from shardlab.same.rows import Rows
from shardlab.same.steps import Held
from shardlab.same.union import union
from shardlab.same.wholes import wholes


def part(value, place=None, shape=None, **options):
    value = torch.as_tensor(value, dtype=torch.float64)
    shape = tuple(value.shape) if shape is None else shape
    return Part("w", shape, place or tuple((0, size) for size in value.shape), value, **options)


def test_wholes_are_put_together_from_boxes_from_flat_pieces_and_from_sums():
    rows = [part([[1.0, 2]], ((0, 1), (0, 2)), (2, 2)), part([[3.0, 4]], ((1, 1), (0, 2)), (2, 2))]
    flat = [part([1.0], ((0, 1),), (2, 2), is_flat=True), part([2.0, 3, 4], ((1, 3),), (2, 2), is_flat=True)]
    sums = [part([[1.0, 1], [1, 1]], adds_up=True), part([[0.0, 1], [2, 3]], adds_up=True)]
    for pieces in (rows, flat, sums):
        views = wholes([[one] for one in pieces])["w"]
        assert [view.tolist() for view in views] == [[[1, 2], [3, 4]]] * 2
        assert views[0] is views[1]  # what no rank has otherwise takes the memory of one
    with pytest.raises(UnlikeError, match="leave out 2 of 4"):
        wholes([[rows[0]], []])


def noted(brought, loss=1.0, counted=()):
    """A process whose backwards have brought these gradients."""
    backwards = [Backward(loss, "", list(counted), [part(one)]) for one in brought]
    total = torch.tensor(brought, dtype=torch.float64).sum(0)
    return Notes([Step(backwards=backwards, gradients=[part(total)], stepped=[part(total)], names=["w"])])


ROWS = ([[1.0, 0, 0, 0], [0, 1.0, 0, 0]], [[0, 0, 1.0, 0], [0, 0, 0, 1.0]])  # by rank and micro-batch


def test_ranks_weigh_as_much_as_they_have_rows_unless_a_step_has_unequal_micro_batches():
    counts = [[Counted(number, float(number))] for number in (3, 1)]
    by_rows = [noted(rows[:1], counted=one) for rows, one in zip(ROWS, counts, strict=True)]
    assert union(by_rows, by_rows, 0).weights == [0.75, 0.25]
    twice = [noted(rows, counted=one) for rows, one in zip(ROWS, counts, strict=True)]
    twice[0].steps[0].backwards[1].counted = [Counted(7, 7.0)]
    found = union(twice, twice, 0)
    assert found.uneven
    assert found.weights == [0.5, 0.5]
    assert union([noted(rows) for rows in ROWS], [noted([*ROWS[0], *ROWS[1]])] * 2, 0).micro_batches == 2
    with pytest.raises(UnlikeError, match="2, 2 backwards on the ranks and 3, 3 in one process"):
        union([noted(rows) for rows in ROWS], [noted([*ROWS[0], ROWS[1][0]])] * 2, 0)


def test_a_micro_batch_weighs_as_much_as_it_has_of_all_ranks_rows_where_losses_are_divided_by_these():
    counts = [[3.0, 2.0], [1.0, 6.0]]  # by rank and micro-batch
    alone, ranks = ([noted(rows) for rows in ROWS] for _ in range(2))
    for rank, micro in ((0, 0), (0, 1), (1, 0), (1, 1)):
        number, every = counts[rank][micro], sum(of_rank[micro] for of_rank in counts)
        alone[rank].steps[0].backwards[micro].counted = [Counted(int(number), number)]
        ranks[rank].steps[0].backwards[micro].loss = 2 * number / every
    assert union(ranks, alone, 0).gradient["w"].tolist() == [0.75, 0.25, 0.25, 0.75]
    assert union(alone, alone, 0).gradient["w"].tolist() == [0.5] * 4
    for one in alone:  # where one process clears a micro-batch, what is left of it is what it steps
        one.steps[0].cleared = [Cleared("w", 1.0, 0, "", is_of_another=False)]
    assert union(ranks, alone, 0).gradient["w"].tolist() == [0.5] * 4


def test_losses_are_a_known_share_on_all_ranks_or_nothing_is_said():
    alone = [noted([row[0]]) for row in ROWS]
    said = {}
    for losses in ((0.5, 0.5), (1.0, 0.5)):
        ranks = [noted([[0.5, 0, 0.5, 0]], loss) for loss in losses]
        said[losses] = answer(ranks, alone)
    assert said[0.5, 0.5].word == "SAME"
    assert said[1.0, 0.5].word == "CANNOT BE SAID"
    assert "the loss of rank 1 is 0.5 times" in str(said[1.0, 0.5])


def test_two_faults_at_once_end_in_a_sentence():
    alone = [noted([row[0]]) for row in ROWS]
    ranks = [noted([row[0]]) for row in ROWS]
    for rank, one in enumerate(ranks):  # half of the parameter each; the second rank steps nothing, and both clip
        step = one.steps[0]
        step.gradients = [part([1.0, 0], ((2 * rank, 2),), (4,))]
        step.stepped, step.clipped, step.max_norm = step.gradients[rank:], ["w"], 1.0
    said = answer(ranks, alone)
    assert [word for word, _ in said.lines[:2]] == ["DIFFERENT SINCE", "CAUSE"]


def test_what_the_step_before_brought_is_told_from_other_values():
    right = [[0.5, 0, 0.5, 0], [0.0, 0.5, 0, 0.5]]
    alone = [Notes([noted([row]).steps[0] for row in rows]) for rows in ROWS]
    ranks = [Notes([noted([right[0]]).steps[0], noted([[0.5, 0.5, 0.5, 0.5]]).steps[0]]) for _ in ROWS]
    assert "the step before brought is still in them, 1 times" in str(answer(ranks, alone))


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        ([1, 1, 1, 1], "added over 2 ranks and not divided, or not divided by the 2 micro-batches"),
        ([0.25] * 4, "divided by the 2 ranks twice, or divided by the 2 micro-batches twice"),
        ([1, 1, 0, 0], "not reduced"),
        ([0, 0.5, 0, 0.5], "only the last micro-batch of 2 is left"),
        ([1, 0.5, 0, 0.5], "only the last micro-batch of 2 is reduced"),
        ([2, 1, 2, 1], "reduced again in every micro-batch"),
        ([0, 0, 0.5, 0.5], "the rows of rank 0 are missing"),
        ([0, 0, 0, 0], "no gradient arrives"),
        ([0.15] * 4, "times 0.3"),
        ([0.5, 0.1, 0.5, 0.2], "rows count otherwise than once"),
    ],
)
def test_the_cause_is_read_from_the_coefficients(ours, said):
    notes = [noted(rows) for rows in ROWS]
    expected = union(notes, notes, 0)
    mixed = mixture({"w": torch.tensor(ours, dtype=torch.float64)}, expected, ["w"])
    assert said in meaning(mixed, expected, 0, 2, [2])[0]


def test_of_a_parameter_with_fewer_elements_than_micro_batches_ranks_are_told_apart():
    rows = [[1.0, 3], [2.0, 1]], [[5.0, 1], [1.0, 2]]
    notes = [noted(of_rank) for of_rank in rows]
    expected = union(notes, notes, 0)
    mixed = mixture({"w": torch.tensor([3.0, 4.0])}, expected, ["w"])
    assert mixed.is_unique
    assert "not reduced" in meaning(mixed, expected, 0, 2, [2])[0]


def test_what_is_no_sum_of_the_ranks_gradients_is_said_to_be_none():
    notes = [noted([row[0]]) for row in ROWS]
    expected = union(notes, notes, 0)
    mixed = mixture({"w": torch.tensor([0.5, 9.0, 0.5, 0])}, expected, ["w"])
    assert "no sum of the ranks' gradients" in meaning(mixed, expected, 0, 2, [2])[0]


def test_nothing_is_dropped_however_torchs_functions_are_called():
    x = torch.randn(1, 2, 4, 8)
    attended = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    with replaced(F, "scaled_dot_product_attention", drops_nothing), replaced(F, "dropout", drops_nothing):
        for made in (
            F.scaled_dot_product_attention(x, x, x, None, 0.9, True),
            F.scaled_dot_product_attention(query=x, key=x, value=x, dropout_p=0.9, is_causal=True),
        ):
            assert torch.allclose(made, attended)
        assert torch.equal(F.dropout(x, 0.9), x)
        assert torch.equal(F.dropout(input=x, p=0.9, training=True), x)


def test_a_rank_that_has_ended_before_it_called_the_model_has_frozen_nothing():
    """As where the other one was refused, and so left the group that this one wanted to join."""
    known = Notes(shapes={"weight": (2, 4)}, trainable=["weight"], refused="gradients are sparse")
    for ranks in ([known, Notes(error="Connection reset")], [Notes(error="Connection reset"), known]):
        assert str(early(ranks)) == "CANNOT BE SAID  gradients are sparse"


def test_a_rank_that_waits_for_one_whose_script_has_ended_says_so():
    """And not what the library that connects them says."""
    waits = Notes(noted(ROWS[0]).steps, error="gloo: reset by peer", left_by_others=True, has_ended=True)
    others = (Notes(noted(ROWS[1]).steps, has_ended=True), Notes(noted(ROWS[1]).steps, has_ended=True, has_enough=True))
    ended, enough = (str(early([waits, other])) for other in others)
    assert "after 1 steps rank 0 waits for rank 1, whose script has ended" in ended
    assert "gloo" not in ended
    assert "gloo" in enough  # it was ended by us


def test_a_rank_that_steps_for_all_is_no_mistake_that_is_seen():
    said = str(early([noted(ROWS[0]), Notes(has_ended=True)]))
    assert said.startswith("CANNOT BE SAID  rank 1 takes no step, and others do: where these send it their weights")


def test_an_optimizer_that_one_rank_makes_anew_is_named():
    ranks = [Notes([noted([row[0]]).steps[0] for _ in range(2)]) for row in ROWS]
    for one, number in zip(ranks, (0, 1), strict=True):
        one.steps[0].optimizer, one.steps[1].optimizer = 0, number
    said = str(early(ranks))
    assert "step 1, in the number of the optimizer that steps: 0, 1, by rank" in said
    assert "rank 1 steps by another optimizer than rank 0" in said


def test_losses_that_are_multiplied_by_the_ranks_are_told_from_gradients_that_nobody_divides():
    alone, ranks = ([noted([row[0]], loss) for row in ROWS] for loss in (1.0, 2.0))
    for one in ranks:
        one.steps[0].stepped = one.steps[0].gradients = [part([1.0, 0, 1.0, 0])]
    assert "times 2: each loss is 2 times that of one process" in str(answer(ranks, alone))


def test_what_comes_after_the_reduction_is_not_said_to_be_cleared():
    notes = [noted(rows) for rows in ROWS]
    expected = union(notes, notes, 0)
    said = {}
    for ours in ([0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5]):
        mixed = mixture({"w": torch.tensor(ours, dtype=torch.float64)}, expected, ["w"])
        said[ours[0]] = meaning(mixed, expected, 0, 2, [2])
    assert said[0.5][0].startswith("only micro-batch 0 of 2 is left")
    assert "after the last micro-batch, and not before" in said[0.5][1]
    assert "not before each backward" in said[0][1]


def test_ranks_that_divide_a_model_by_dtensor_and_have_other_rows_are_told():
    alone = [noted([row[0]]) for row in ROWS]
    ranks = [noted([row[0]], 0.3) for row in ROWS]
    for rank, one in enumerate(ranks):
        step = one.steps[0]
        step.weights = [part([1.0, 1.0], ((2 * rank, 2),), (4,))]
        step.calls = {0: [Call([torch.full((2,), rank)])]}
        step.messages = [Message("all_reduce", "dtensor", "train.py:3", (0, 1), "float64", (), 0)]
    assert "ranks 0 and 1 divide parameters and are given different rows, or" in str(answer(ranks, alone))
    ranks[1].steps[0].calls = ranks[0].steps[0].calls
    assert "different rows" not in str(answer(ranks, alone))


def loop(rank, divisor, sharded=False, how="backward", steps=3):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD([torch.zeros(2)] if sharded else model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    with watch(model, optimizer, steps=steps) as watched:
        for _ in range(5):
            x = torch.randn(8, 4, requires_grad=True)
            loss = model(x).square().mean()
            if how == "grad":
                for param, found in zip(model.parameters(), torch.autograd.grad(loss, model.parameters()), strict=True):
                    param.grad = found
            elif how == "a part alone":
                (slope,) = torch.autograd.grad(model[0](x).sum(), x, create_graph=True)
                (loss + slope.square().sum()).backward()
            else:
                loss.backward()
            for param in model.parameters():
                dist.all_reduce(param.grad)
                param.grad /= divisor
            optimizer.step()
            optimizer.zero_grad()
    return str(watched.answer), len(watched.notes.steps), float(model[0].weight.sum())


def test_a_loop_that_is_watched(pools):
    right = pools(2).run(loop, 2.0)
    assert right[0] == right[1]
    assert right[0][0].startswith("SAME")
    assert right[0][1] == 3
    (wrong, *_), _ = pools(2).run(loop, 1.0)
    assert wrong.startswith("DIFFERENT SINCE")
    assert "added over 2 ranks and not divided" in wrong
    with pytest.raises(RankError, match="optimizer: it steps no parameter of the model"):
        pools(2).run(loop, 1.0, True)
    with pytest.raises(RankError, match="steps: 0 is given; it must be 1 or more"):
        pools(2).run(loop, 2.0, steps=0)


def test_what_is_said_of_a_watched_loop_is_what_was_seen(pools):
    """Gradients, but not what steps make of them; parts that are called by themselves have the model's weights."""
    penalised, unseen = (pools(2).run(loop, 2.0, how=how)[0][0] for how in ("a part alone", "grad"))
    assert " ".join(penalised.split()).startswith("SAME gradients of 2 parameters in 3 steps")
    assert "LOST" not in penalised
    assert unseen.startswith("CANNOT BE SAID")
    assert "what torch.autograd.grad or torch.func.grad return is not compared" in unseen


@pytest.mark.parametrize(("moves", "lost"), [(1.0, ["bias"]), (0.0, ["weight", "bias"])])
def test_gradients_by_which_weights_were_moved_are_not_lost_when_they_are_cleared(moves, lost):
    """As SAM does, between two backwards of a step."""
    model, notes = torch.nn.Linear(3, 1), Notes()
    capture = Capture(Rows(notes, float64=False), notes, rank=0, limit=3, dropout=True)
    with capture.listening():
        model(torch.ones(2, 3)).sum().backward()
        model.weight.data += moves * model.weight.grad
        model.zero_grad()
    assert [one.name for one in capture.step.cleared] == lost
    assert capture.step.is_moved == bool(moves)


def test_an_option_that_depends_on_the_number_of_ranks_is_told_though_steps_are_the_same():
    alone, ranks = ([noted([row[0]]) for row in ROWS] for _ in range(2))
    for one in ranks:
        one.steps[0].stepped = one.steps[0].gradients = [part([0.5, 0, 0.5, 0])]
    for lr, notes in ((0.1, alone), (0.2, ranks)):
        for one in notes:
            one.steps[0].options = [{"lr": lr, "momentum": 0.9}]
    said = str(answer(ranks, alone))
    assert said.startswith("SAME")
    assert "lr is 0.2 on rank 0 and 0.1 in one process in step 0" in said
    assert "momentum is" not in said


def test_what_a_script_multiplies_all_gradients_by_after_backward_is_no_difference():
    alone, ranks = ([noted(rows) for rows in ROWS] for _ in range(2))
    for one, mine in zip(alone, ranks, strict=True):
        one.steps[0].scale = 0.5
        mine.steps[0].stepped = mine.steps[0].gradients = [part([0.25] * 4)]
    assert answer(ranks, alone).word == "SAME"
    for mine in ranks:
        mine.steps[0].stepped = mine.steps[0].gradients = [part([0.5] * 4)]
    said = str(answer(ranks, alone))
    assert "times 2: added over 2 ranks and not divided" in said
    assert "(in one process gradients are multiplied by 0.5 after backward, too)" in said
    alone[0].steps[0].scale = 2.0
    assert "times 2, 0.5: neither by one number, by one over the rows of a sum, nor" in str(answer(ranks, alone))


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        ([1.0, 2, 3, 5], "chosen by ReduceOp.MAX"),
        ([-4.0, 1, 2, 1], "chosen by ReduceOp.MIN"),
        ([1.0, 1, 3, 5], "all ranks step the gradient of rank 0: the rows of the others are missing"),
        ([-1.5, 1.5, 2.5, 1], "changed one by one; 1 of 4 elements differ"),
    ],
)
def test_what_all_ranks_step_and_is_no_mean_of_theirs_is_named(ours, said):
    alone, ranks = ([noted([row]) for row in ([1.0, 1, 3, 5], [-4.0, 2, 2, 1])] for _ in range(2))
    for one in ranks:
        one.steps[0].stepped = one.steps[0].gradients = [part(ours)]
    assert said in str(answer(ranks, alone))


def test_a_reduce_to_one_rank_is_named():
    alone, ranks = ([noted([row[0]]) for row in ROWS] for _ in range(2))
    for one, gradient in zip(ranks, ([0.5, 0, 0.5, 0], [0.5, 3, 0.5, 0]), strict=True):
        step = one.steps[0]
        step.stepped = step.gradients = [part(gradient)]
        step.messages = [Message("reduce", "", "train.py:3", (0, 1), "float64", ("w",), 1)]
    said = answer(ranks, alone).lines
    assert ("CAUSE", "reduce gives the sum to one rank alone, and leaves something else on rank 1") in said
    assert [word for word, _ in said].count("CAUSE") == 1


def test_losses_times_ranks_are_known_where_one_process_has_all_rows_at_once():
    alone, ranks = [noted([[1.0, 1.0]])] * 2, [noted([[2.0, 2.0]], loss=2.0) for _ in range(2)]
    assert "times 2: added over 2 ranks and not divided" in str(answer(ranks, alone, is_together=True))


def test_a_gradient_that_a_backward_leaves_as_it_was_is_neither_brought_by_it_nor_lost():
    held = Held()
    held.brought([part([1.0])], 0)
    held.stepped(["w"])
    assert held.kept() == {"w": 1.0}
    held.brought([part([1.0])], 0)  # of another optimizer's loss
    held.stepped(["other"])
    assert held.cleared([], "train.py:1") == []


def test_gradients_that_another_optimizer_clears_later_are_not_said_to_stay():
    ranks = [noted([row[0]]) for row in ROWS]
    for name, told in (("other", False), ("w", True)):
        for one in ranks:
            one.steps[0].backwards[0].grew_from = {name: 1.0}
        assert ("nothing clears them" in str(answer(ranks, ranks))) == told
