"""Guards beside an engine: one snapshot of all that it owns, compared at the engine's verbs with a table of rules.

With ``guards=False`` every right program trains, bit for bit the same: of the engines' files only the package's own
``__init__`` imports this room. What a rule refuses on one rank, all ranks refuse in the same verb: the engine keeps the
refusal until its next flag.
"""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter, is_

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.utils.hooks import RemovableHandle

from shardlab.comm.same_on_all_ranks import all_or_none
from shardlab.engines.engine import Engine
from shardlab.engines.guards import model_checks, rules
from shardlab.engines.guards.clipping import GuardedTensors, guard_groups
from shardlab.engines.guards.optimizer_fit import check_fits
from shardlab.engines.guards.ownership import Claim, check_free
from shardlab.engines.guards.placeholder import PlaceholderGradient, StubbedParameter, refuse_loading, sharded_parameter
from shardlab.engines.guards.rules import LOCAL, Rule, Where
from shardlab.engines.guards.snapshot import Snapshot
from shardlab.engines.guards.strategy_checks import check_strategy, laid_out_by
from shardlab.engines.moments import GradientState, Moment
from shardlab.engines.sharded_params import Shards
from shardlab.vocabulary import MeshAxis, Partition

_TRAINS = attrgetter("requires_grad")
_BEHIND = {Moment.BACKWARD: "after forward", Moment.STEP: "after backward"}


class Guards:
    """Asked by one engine at its verbs.

    Args:
        model: what the user has given the engine, as the others.
        mesh: likewise.
        optimizer_fn: likewise.
        strategy: likewise.

    Raises:
        ValueError: one of them is something else.
    """

    laid_out = staticmethod(laid_out_by)

    quiet: Collection[Moment] = ()
    """When there is nothing to do for this engine."""

    looks_once = False
    """Inside ``looking_once``."""

    def __init__(self, model: object, mesh: object, optimizer_fn: object, strategy: object) -> None:
        check_strategy(strategy)
        model_checks.check_types(model, mesh, optimizer_fn)
        self._to_raise: Exception | None = None  # what was refused, until the next flag
        self._claim: Claim | None = None
        self._optimizer: torch.optim.Optimizer | None = None  # that a step has checked
        self._placeholders: dict[str, PlaceholderGradient] = {}
        self._lost = ""  # a sharded parameter whose data was replaced while it was gathered
        self._marked: dict[str, str] = {}  # what to refuse of a gradient at the next exchange, if it is still there
        self._has_moved = False  # a piece is elsewhere, for good: what is stepped there reaches nothing
        self._hooks: list[RemovableHandle] = []
        self._shown: list[tuple[Shards, Callable[[bool], None]]] = []  # to be told when the parameters are plain again

    def ask(self, moment: Moment, engine: Engine) -> None:
        """Look at what is at this moment; what is refused is kept until all ranks meet next, see ``refused``.

        Raises:
            ValueError: at ``MODEL`` and ``BUILT``: what cannot be trained.
            RuntimeError: a rule of the table, where there is one rank alone.
        """
        if self.looks_once and moment in (Moment.FORWARD, Moment.BACKWARD):
            self.quiet = {*self.quiet, moment}
        try:
            with torch._C.DisableTorchFunctionSubclass():  # as ``unrefused``
                self._look(moment, engine)
        except (RuntimeError, ValueError) as refusal:
            if moment in (Moment.MODEL, Moment.BUILT) or (engine.num_data_ranks == 1 and moment is not Moment.CLOSE):
                raise
            if moment is Moment.FORWARD and not torch.is_grad_enabled():
                warnings.warn(str(refusal), stacklevel=7)  # there may be no exchange any more
            self._to_raise = self._to_raise or refusal

    @contextmanager
    def looking_once(self, engine: Engine) -> Iterator[None]:
        """See ``Engine.looked_at_once``."""
        if Where.SHARDED in self._where:  # each pass gathers anew, which writes into parameters
            yield
            return
        quiet, self.looks_once = self.quiet, True
        self.quiet = {*quiet, Moment.FORWARDED, Moment.BACKWARD_ENDED}
        try:
            yield
        finally:
            had_backward = Moment.BACKWARD in self.quiet
            self.quiet, self.looks_once = quiet, False
            if had_backward and engine.gradient_state in LOCAL:
                self.ask(Moment.BACKWARD_ENDED, engine)

    def refused(self) -> Exception | None:
        """What was refused since this was asked last."""
        refusal, self._to_raise = self._to_raise, None
        return refusal

    def explain(self, error: Exception, engine: Engine) -> None:
        """Say of an error of a forward what may have caused it: what was refused before, or see ``advise``."""
        if (refusal := self.refused()) is not None:
            raise refusal from error
        model_checks.advise(error, engine.strategy, engine.module)

    def _look(self, moment: Moment, engine: Engine) -> None:
        """Refuse what must not be at this moment; then remember what is."""
        if moment is Moment.MODEL:
            self._check_model(engine)
            check_free(engine.module, engine.strategy)
            scripted = [name for name, one in engine.module.named_modules() if isinstance(one, torch.jit.ScriptModule)]
            if scripted and engine.strategy.full_gathers:
                raise ValueError(
                    f"model: {scripted[0] or 'the model'!r} is TorchScript, which computes with parameters of its own, "
                    "and these are sharded; use the module it was made from, or ddp, bucketed, zero1 or zero2"
                )
            return
        if moment is Moment.BUILT:
            self._build(engine)
        if engine.num_full_blocks and moment is Moment.FULL_LEFT:
            return  # an inner block
        refusal = "" if moment in (Moment.BUILT, Moment.CLOSED) else self._refusal(moment, engine)
        if moment is Moment.STEP and not refusal:
            self._check_step(engine)
        if engine.strategy.steps_pieces:
            self._set_placeholders(moment, engine)
        if self._claim is not None and moment in (Moment.UPDATE, Moment.STEPPED, Moment.INSTALL, Moment.INSTALLED):
            self._claim.verb = {Moment.UPDATE: "step", Moment.INSTALL: "load"}.get(moment, "")
        if moment is Moment.UPDATE:
            for param, text in self._half_stepped:
                StubbedParameter.hide(param, text)
        elif moment is Moment.UPDATED:
            for param, _ in self._half_stepped:
                StubbedParameter.show(param)
        self._remember(moment, engine)
        if moment is Moment.CLOSED:
            self._release()
        if refusal:
            raise RuntimeError(f"{refusal} (notebooks/guide/loop.md)")

    def _check_step(self, engine: Engine) -> None:
        if engine.optimizer is not self._optimizer:
            model_checks.check_optimizer(engine.optimizer, engine.step_tensors())
            self._optimizer = engine.optimizer
        # A group may have been added: of a tensor that the engine does not know nobody averages the gradients.
        model_checks.check_stepped(engine.optimizer, self._stepped)
        if engine.strategy.precision.compute is torch.float16 and not engine.loss_is_scaled:
            warnings.warn(
                "precision: float16 without a GradScaler loses gradients below 6e-8; use engine.backward("
                "scaler.scale(loss)) and scaler.step(engine), or precision='bf16'",
                stacklevel=9,  # where step() was called
            )

    @staticmethod
    def _check_model(engine: Engine) -> None:
        strategy, device = engine.strategy, engine.mesh.device
        model_checks.check_rows(engine.mesh, strategy.axes, engine.name)
        if strategy.is_alone and engine.num_data_ranks > 1:
            raise ValueError(
                f"mesh: {engine.name!r} trains in one process, but the data axis has {engine.num_data_ranks} ranks; "
                "use Mesh.alone(), or another strategy"
            )
        if engine.num_data_ranks > 1:
            model_checks.check_sparse(engine.module)
        model_checks.check_tensor_axis(engine.mesh, engine.module, engine.slices)
        model_checks.check_model(
            engine.module, device, engine.num_data_ranks, may_be_meta=strategy.allocates,
            moves_params=strategy.steps_pieces,
        )  # fmt: skip
        model_checks.check_batch_norms(engine.module, strategy.precision)

    def optimizer(
        self, build: Callable[[Callable[[torch.optim.Optimizer], None]], torch.optim.Optimizer], params:
        Mapping[str, nn.Parameter], engine: Engine,
    ) -> torch.optim.Optimizer:  # fmt: skip
        """The optimizer that ``build`` returns.

        Args:
            build: takes what checks the optimizer before its groups get pieces.
            params: that it is built from.
            engine: whose it will be.

        Raises:
            ValueError: it does not fit the engine's tensors; on all ranks.
        """
        for unit in engine.strategy.units:
            for shards in unit.shards:
                self._watch(shards)
        over = engine.sharded_over
        partition = None if over is None else engine.strategy.partition
        if partition is None and MeshAxis.PIPE in engine.mesh.axes and engine.mesh[MeshAxis.PIPE].num_ranks > 1:
            partition = Partition.CONTIGUOUS  # a stage is whole parameters
        is_sliced = any(one.num_ranks > 1 for one in engine.slices.values())

        def fitting() -> torch.optim.Optimizer:
            before = [param._version for param in engine.params.values()]
            try:
                optimizer = build(lambda made: model_checks.check_optimizer(made, params.values()))
            except ValueError as error:
                frozen = [name for name, param in engine.params.items() if not param.requires_grad]
                if not frozen or str(error).startswith("optimizer"):  # or it has been said what to do
                    raise
                raise ValueError(f"optimizer_fn: {error}; {rules.FROZEN.format(name=frozen[0])}") from error
            check_fits(optimizer, partition, is_sliced=is_sliced)
            if engine.strategy.full_gathers and before != [param._version for param in engine.params.values()]:
                raise ValueError("optimizer_fn: it writes into parameters; write before the engine is built")
            return optimizer

        try:
            return fitting() if over is None else all_or_none(engine.comms, engine.mesh.device, fitting)
        except Exception:
            self._release()
            raise

    def _build(self, engine: Engine) -> None:
        strategy = engine.strategy
        self._is_stage = MeshAxis.PIPE in engine.mesh.axes  # of a pipeline: other parameters are on other ranks
        are_parts = engine.sharded_over is not None or bool(engine.slices) or self._is_stage
        self._tensors = engine._step_tensors = GuardedTensors(dict(engine.step_tensors().items()), are_parts=are_parts)
        kinds = ("_modules", "_parameters")  # TorchScript has something else there
        homes = [vars(module).get(kind) for module in engine.module.modules() for kind in kinds]
        there = [(home, *item) for home in homes if isinstance(home, dict) for item in home.items()]
        self._homes, self._keys, self._there = ([one[place] for one in there] for place in range(3))
        self._stepped: set[int] = {id(tensor) for _, tensor in self._tensors.items()}
        self._choose_rules(engine)
        pieces = dict(self._tensors.items()) if strategy.steps_pieces else {}
        self._snapshots = {"parameter": Snapshot(engine.params), "piece": Snapshot(pieces)}
        self._freed = {name for name, param in engine.params.items() if param.numel() and not param.data_ptr()}
        if Where.SHARDED in self._where:
            modules = [module for module in engine.module.modules() if module._parameters]
            self._hooks = [module.register_load_state_dict_pre_hook(refuse_loading) for module in modules]
        if strategy.steps_pieces:
            guard_groups(engine.optimizer, self._tensors.check_caller)
        self._claim = Claim(
            engine, engine.params.values(), engine.optimizer, lambda other: self._before_others_step(other, engine),
            strategy,
        )  # fmt: skip

    def _choose_rules(self, engine: Engine) -> None:
        """Find out which rules are for this engine, and when each is asked."""
        self._is_alone = not self._is_stage and all(comm.num_ranks == 1 for comm in engine.comms)
        self._is_plain = self._is_alone and not engine.strategy.steps_pieces
        where = self._where = rules.where_of(engine)
        refuses = {Where.SPREAD, Where.FLAT} <= where  # while the optimizer steps, other ranks step the rest of them
        params = engine.params.items() if refuses else ()
        self._half_stepped = [(param, rules.HALF_STEPPED.format(name=name)) for name, param in params]
        # Of one process whose gradients are in one place, what changes them changes means.
        never = "gradient_version" if self._is_plain else ""
        chosen = [rule for rule in rules.RULES if rule.where in where and rule.change != never]
        self._rules = {moment: [rule for rule in chosen if moment in rule.at] for moment in Moment}
        self._remembered = rules.remembered(chosen, is_sharded=Where.SHARDED in where)
        self._judged = tuple({state for rule in chosen for state in rule.gradients})  # when a rule looks at gradients
        if Where.SHARDED not in where:  # else a parameter may have been lost, which is told as soon as can be
            idle = (Moment.FORWARDED, Moment.MEANS_ALREADY, *([] if refuses else [Moment.UPDATED]))
            self.quiet = {moment for moment in idle if not self._rules[moment] and not self._remembered[moment]}

    def _watch(self, shards: Shards) -> None:
        """Let parameters refuse to be used while they are sharded."""
        texts = {name: sharded_parameter(name) for name in shards.params}

        def show(is_shown: bool) -> None:
            for name, param in shards.params.items():
                if is_shown:
                    StubbedParameter.show(param)
                    continue
                if name in shards.gathered and param.data_ptr() != shards.gathered[name].data_ptr():
                    self._lost = self._lost or name
                StubbedParameter.hide(param, texts[name])

        shards.watchers.append(show)
        show(False)
        self._shown.append((shards, show))

    def _refusal(self, moment: Moment, engine: Engine) -> str:
        lost, self._lost = self._lost, ""
        if lost and moment is not Moment.FULL_LEFT:
            return rules.LOST.format(name=lost)
        if moment in (Moment.FORWARD, Moment.STEP, Moment.FULL, Moment.SAVE) and (name := self._taken_out(engine)):
            return rules.REPLACED.format(name=name)
        if moment in (Moment.STEP, Moment.STEPPED) and (dropped := engine.mesh.take_dropped()) is not None:
            line = dropped.source_line or "a place nobody observed"
            return rules.DROPPED.format(op=dropped.op, tag=dropped.tag, line=line)
        if moment is Moment.ZERO_GRAD:
            engine.mesh.take_dropped()  # after an error or an interrupt they are no fault
            self._marked.clear()
        elif self._marked and moment in (Moment.BACKWARD, Moment.REDUCE):
            for name in self._snapshots["parameter"].changed("gradient"):
                self._marked.pop(name, None)
        for rule in self._rules[moment]:
            if self._is_asked(rule, moment, engine):
                for name in self._snapshots[rule.of].changed(rule.change):
                    if rule.where is not Where.SLICED or name in engine.slices or self._is_stage:
                        text = rule.text.format(name=name)
                        if rule.text is rules.LOST and name in self._freed and engine.params[name].data_ptr():
                            text = rules.GATHERED.format(name=name, when=_BEHIND.get(moment, "where nothing computes"))
                        if moment is not Moment.BACKWARD or rule.change not in ("gradient", "gradient_version"):
                            self._has_moved |= (rule.of, rule.change) == ("piece", "place")
                            return text
                        self._marked.setdefault(name, text)
        return next(iter(self._marked.values()), "") if moment in (Moment.REDUCE, Moment.BACKWARD_SENDS) else ""

    def _taken_out(self, engine: Engine) -> str:
        """The name of a parameter that the module has lost, by an assignment, or as parametrizations do."""
        if all(map(is_, map(dict.get, self._homes, self._keys), self._there)):  # at each forward: no loop of Python
            return ""
        left = set(engine.module.parameters())  # under other names, as after pruning
        return next((name for name, param in engine.params.items() if param not in left), "")

    def _is_asked(self, rule: Rule, moment: Moment, engine: Engine) -> bool:
        if rule.gradients and engine.gradient_state not in rule.gradients:
            return False
        if rule.where is Where.WHOLE and self.looks_once:  # a forward between its backwards may write
            return False
        if rule.change == "gradient_version" and self._is_alone:
            # One process alone may change its sums, which are the means; unless earlier ones are elsewhere.
            return engine.gradient_state is GradientState.MEANS_AND_LOCAL
        if rule.of == "piece":
            if rule.where is Where.SHARDED and not engine.num_full_blocks and moment is not Moment.FULL_LEFT:
                return False
            return moment is Moment.STEPPED or not self._is_stepping  # they may be on a visit, and are stepped
        # What is written into full parameters may be kept, and until then it is right to compute with.
        return rule.change not in ("place", "version") or not engine.num_full_blocks or moment is Moment.STEP

    @property
    def _is_stepping(self) -> bool:
        return self._claim is not None and self._claim.verb == "step"

    def _set_placeholders(self, moment: Moment, engine: Engine) -> None:
        """Put placeholders at ``param.grad`` while the mean is at the piece; take them away before autograd adds."""
        if moment is Moment.MEANS or (moment is Moment.BACKWARD_ENDED and Where.ELSEWHERE in self._where):
            for name, param in engine.params.items():
                if param.requires_grad and param.grad is None:
                    placeholder = self._placeholders.get(name)
                    if placeholder is None or placeholder.dtype != param.dtype:
                        placeholder = self._placeholders[name] = PlaceholderGradient.of(name, param)
                    param.grad = placeholder
        elif moment in (Moment.BACKWARD, Moment.REDUCE, Moment.ZERO_GRAD, Moment.CLOSED):
            for param in engine.params.values():
                if isinstance(param.grad, PlaceholderGradient):
                    param.grad = None

    def _remember(self, moment: Moment, engine: Engine) -> None:
        for kind, field in self._remembered[moment]:
            is_inside = engine.num_full_blocks and moment is not Moment.STEPPED  # a step there, which is right, gathers
            if kind == "piece" and (is_inside or (field == "place" and (self._has_moved or self._is_stepping))):
                continue  # not what they were is right
            is_gathered = kind == "piece" and moment is Moment.STEPPED and Where.SPREAD in self._where
            self._snapshots[kind].remember(field, _gathered(engine) if is_gathered else None)
        gradients = self._snapshots["parameter"]
        if moment in rules.AFTER_GRADIENTS:
            self._tensors.are_behind = engine.gradient_state in LOCAL and not self._is_plain
            if engine.gradient_state in self._judged:
                gradients.remember_gradients()
            else:
                gradients.forget_gradients()
        elif moment is Moment.STEPPED:  # they are spent, and some optimizers change them
            gradients.forgive_gradients()

    @staticmethod
    def _before_others_step(optimizer: torch.optim.Optimizer, engine: Engine) -> None:
        """Refuse an optimizer that steps the module's parameters, too early or in the place of pieces of them."""
        others, pieces, kind = model_checks.tensors_of(optimizer), engine.step_tensors(), type(optimizer).__name__
        for name, param in engine.params.items():
            piece = pieces.by_name(name)
            is_given = id(param) in others
            is_local = engine.gradient_state in LOCAL and (is_given or id(piece) in others)
            if engine.num_data_ranks > 1 and (is_local or (engine._running and is_given)):
                raise RuntimeError(
                    f"{kind}.step(): gradients of {name!r} are not averaged over the ranks yet, inside a backward or "
                    "after one inside no_sync(); write engine.step(), or call engine.finish_gradients() first, on all "
                    "ranks"
                )
            if is_given and piece is not param:
                raise RuntimeError(
                    f"{kind}.step(): it steps the module's {name!r}, but strategy {engine.name!r} steps a piece of it; "
                    "let the engine build the optimizer, as in build_engine(strategy, model, lambda tensors: "
                    "AdamW(tensors, lr=1e-3), mesh), and write engine.step()"
                )
        increment_version([one for one in pieces if one.grad is not None and id(one) in others])  # fused kernels do not

    def _release(self) -> None:
        if self._claim is not None:
            self._claim.release()
            self._claim = None
        for shards, show in self._shown:
            shards.watchers.remove(show)
            show(True)
        for hook in self._hooks:
            hook.remove()


def _gathered(engine: Engine) -> set[str] | None:
    """The parameters whose pieces are gathered after a step, None for all; nobody gathers a bucket that is frozen."""
    if all(map(_TRAINS, engine.params.values())):
        return None
    buckets = (division.layout.names for division in engine.divisions())
    return {name for names in buckets if any(engine._is_due(engine.params[one]) for one in names) for name in names}
