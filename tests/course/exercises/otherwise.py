"""Mistakes in whole strategies, written into the printed solutions: otherwise than the wrong solutions of the tests.

By exercise: the mistake's name in ``mistakes.toml``, and what stands in the solution in the place of what.
"""

from collections.abc import Callable, Mapping

from shardlab.course import LADDER, Exercise
from shardlab.course.exercises.exercise import code_in
from shardlab.course.exercises.ladder import solution_of


def named(name: str) -> Exercise:
    """An exercise by its name."""
    return next(one for one in LADDER if one.name == name)


def printed(exercise: Exercise, changes: Mapping[str, str] | None = None) -> Callable[..., object]:
    """The solution that teachers read, or what it is with texts in the place of others."""
    source = code_in(solution_of(exercise))
    for before, after in (changes or {}).items():
        assert before in source, before
        source = source.replace(before, after)
    return defined(source, exercise.function_name)


def defined(source: str, name: str) -> Callable[..., object]:
    """What a cell with this text defines under a name.

    In a namespace without ``__name__`` functions have no module, and cloudpickle looks for each in all modules.
    """
    exec(compile(source, "solution", "exec"), namespace := {"__name__": "__main__"})
    return namespace[name]


OTHERWISE = {
    "whole.ddp": [
        ("sums", {"        for param in due:\n            param.grad /= self.num_ranks\n": ""}),
        ("divided_twice", {"param.grad /= self.num_ranks": "param.grad /= self.num_ranks**2"}),
        ("thrown_away", {"all_reduce(param.grad,": "all_reduce(param.grad.clone(),"}),
        ("skips_unused", {"if self.is_due(param)]": "if param.grad is not None]"}),
        ("sends_more", {"        for each in pending:": """\
        pending.append(self.comm.all_reduce(torch.ones(3), tag="are you there?"))
        for each in pending:"""}),
    ],
    "whole.bucketed": [
        ("sums", {"                flat /= self.num_ranks\n": ""}),
        ("late", {"        if sends:": "        if sends and False:"}),
        ("late", {"reversed(given.params.values())": "given.params.values()"}),
        ("waits_at_once", {'tag="a bucket") if parts else None))\n': """\
tag="a bucket") if parts else None))
            for _, _, pending in self.sent:
                if pending is not None:
                    pending.wait()
"""}),
        ("one_bucket", {"> self.bucket_bytes": "> 2**20"}),
    ],
    "whole.zero1": [
        ("sums", {"        mean /= self.num_ranks\n": ""}),
        ("nobody_gathers", {"def stepping(": "def _stepping("}),
        ("nobody_gathers", {
            'self.comm.all_gather(self.flat, self.flat[start:stop].clone(), tag="parameters").wait()': "pass",
        }),
        ("gathers_too_early", {
            "        yield\n        start, stop": "        start, stop",
            'tag="parameters").wait()\n': 'tag="parameters").wait()\n        yield\n',
        }),
        ("all_reduces", {'self.comm.reduce_scatter(full, mean, tag="gradients").wait()': """\
self.comm.all_reduce(full, tag="gradients").wait()
        mean.copy_(full[start:stop])"""}),
    ],
    "whole.zero2": [
        ("sums", {"            mean /= self.num_ranks\n": ""}),
        ("nobody_gathers", {"def stepping(": "def _stepping("}),
        ("after_backward", {"        if sends:": "        if sends and False:"}),
        ("after_backward", {"reversed(self.params.items())": "self.params.items()"}),
        ("waits_at_once", {"            self.sent[name] = ": "            sent = self.sent[name] = ",
                           'tag=f"gradient of {name}")\n': 'tag=f"gradient of {name}")\n            sent[1].wait()\n'}),
        ("keeps_whole_gradients", {"            param.grad = None\n": ""}),
    ],
    "whole.zero3": [
        ("sums", {"        mean /= self.num_ranks\n": ""}),
        ("not_freed", {"    def in_forward(self):\n        return self._gathered()": """\
    @contextlib.contextmanager
    def in_forward(self):
        self.flat.untyped_storage().resize_(self.num_bytes)
        self.comm.all_gather(self.flat, self.shard, tag="parameters").wait()
        yield"""}),
        ("empty", {"    def in_backward(self, *, sends):\n        return self._gathered()\n": ""}),
        ("gathers_again", {"    def make_means(self):\n": """\
    def make_means(self):
        with self._gathered():
            pass
"""}),
    ],
    "whole.fsdp": [
        ("sums", {"            mean /= self.num_ranks\n": ""}),
        ("skips_units", {
            "while message in": "if message in",
            "self.messages.pop(0)": "self.messages.pop(self.messages.index(message))",
        }),
        ("no_prefetch", {"        self._send_until((Unit.start, ahead))\n": ""}),
        ("no_prefetch_in_forward", {"self._use(at, at + 1)": "self._use(at, at)"}),
        ("too_much_gathered", {
            "        self._units[place].free()\n        if output": "        if output",
            "            unit.free()  # where this rank skipped it\n": "            pass\n",
        }),
        ("no_prefetch_in_backward", {"self._use(place, place - 1)": "self._use(place, place)"}),
        ("all_at_once", {"(Unit.start, ahead)": "(Unit.start, len(self._units) - 1)"}),
        ("late", {" + [(Unit.reduce, place)] * sends": ""}),
        ("waits_at_once", {'mean, self.comm.reduce_scatter(full, mean, tag="gradients")\n': """\
mean, self.comm.reduce_scatter(full, mean, tag="gradients")
        self.reducing[1].wait()
"""}),
        ("not_freed", {
            "        self._units[place].free()\n        if output": "        if output",
            "            unit.free()  # where this rank skipped it\n": "            pass\n",
            "        self._send_until(last)\n        for unit in self._units:\n            unit.free()\n":
            "        self._send_until(last)\n",
        }),
        ("empty", {"            output.register_hook(lambda _: self._use(place, place - 1))": "            pass"}),
    ],
    "whole.tensor": [
        ("terms_of_the_gradient", {'        context.comm.all_reduce(total, tag="gradient of x").wait()\n': ""}),
        ("terms_of_the_output", {'        comm.all_reduce(total, tag="output").wait()\n': ""}),
        ("bias_on_every_rank", {"(self.between(hidden), self.row)": "(self.between(hidden), self.row, self.row_bias)",
                                " + self.row_bias": ""}),
        ("views", {"[comm.rank].clone()": "[comm.rank]"}),
        ("others", {"        self.comm = comm\n": "        self.comm, self.given = comm, (block,)\n"}),
    ],
    "pipeline.schedule": [
        ("all_forwards_first", {"min(num_ranks - rank, num_micro_batches)": "min(num_ranks + 1, num_micro_batches)"}),
        ("idles_more", {"min(num_ranks - rank, num_micro_batches)": "1"}),
        ("loses_the_last_batch", {"    ahead =": "    num_micro_batches -= 1\n    ahead ="}),
        ("backward_first", {"    return actions": "    return [actions.pop(ahead), *actions]"}),
        ("forgets_a_backward", {"    return actions": "    return [each for each in actions if each[1:] != 'B1']"}),
        ("all_forwards_first", {"num_ranks - rank, num": "num_ranks - rank + (rank + 1 == num_ranks), num"}),
        ("counted_from_one", {"min(num_ranks - rank, num_micro_batches)": "num_ranks - rank"}),
    ],
    "pipeline.finish": [
        ("nothing_finished", {"in means)": "in means[:1])", '"gradients": means': '"gradients": sums[:]'}),
        ("norm_of_the_first", {"in means)": "in means[:1])"}),
        ("norm_of_the_first", {"total.sqrt()": "total"}),
        ("norm_of_the_first", {"in means)": "in sums)"}),
    ],
}  # fmt: skip
UNKNOWN = {
    "whole.ddp": {"param.grad /= self.num_ranks": "param.grad *= 0.3"},
    "whole.zero1": {"self.pieces[piece.name].grad = mean[": "self.pieces[piece.name].grad = mean.flip(0)["},
    "whole.fsdp": {"unit.cut(mean)": "unit.cut(mean.sin())"},
}  # fmt: skip
"""What no table knows: nothing may be said of it."""
COPIES = {
    "whole.zero1": {"self.pieces[piece.name] = self.flat[": "self.pieces[piece.name] = self.flat.clone()["},
    "whole.zero3": {"self.pieces[piece.name] = self.shard[": "self.pieces[piece.name] = self.shard.clone()["},
}  # fmt: skip
