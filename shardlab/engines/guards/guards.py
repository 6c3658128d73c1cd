"""Guards beside an engine: one snapshot of all that it owns, compared at the engine's verbs with a table of rules.

Delete this room and every right program still trains, bit for bit the same. What a rule refuses on one rank, all ranks
refuse in the same verb: the engine keeps the refusal until its next flag.
"""

import warnings
from collections.abc import Callable

import torch
from torch.autograd.graph import increment_version
from torch.utils.hooks import RemovableHandle

from shardlab.engines.agreement import all_or_none
from shardlab.engines.checks import check_not_scripted, check_optimizer, check_others_step
from shardlab.engines.engine import Engine
from shardlab.engines.gradients import Gradients
from shardlab.engines.guards.claims import Claim, check_free
from shardlab.engines.guards.optimizers import Cut, fitting_optimizer
from shardlab.engines.guards.placeholder import PlaceholderGradient, StubbedParameter, refuse_loading
from shardlab.engines.guards.rules import FROZEN, HALF_STEPPED, LOST, OPEN, REPLACED, RULES, Rule, Where
from shardlab.engines.guards.snapshot import Mark, mark
from shardlab.engines.shards import Shards
from shardlab.engines.step_tensors import OptimizerFn, guard_groups, tensors_of
from shardlab.vocabulary import Partition

_DATA, _GRADIENTS = ("version", "trains"), ("gradient", "gradient_version")
_ALL = ("place", *_DATA)
# What the engine itself, autograd or the optimizer has just changed: to be remembered as it is now.
_CHANGED = {
    "built": _ALL + _GRADIENTS, "local": _DATA + _GRADIENTS, "means": _GRADIENTS, "zero_grad": _GRADIENTS,
    "forwarded": _DATA, "stepped": _DATA, "failed": _DATA + _GRADIENTS, "full": _DATA, "left full": _ALL,
    "loaded": _ALL,
}  # fmt: skip
# The same, of versions of what is not gathered anew for each forward.
_WRITTEN = frozenset({"built", "stepped", "left full", "loaded"})


class Guards:
    """Asked by one engine at its verbs."""

    def __init__(self) -> None:
        self._marks: dict[str, dict[str, Mark]] = {}
        self._claim: Claim | None = None
        self._placeholders: dict[str, PlaceholderGradient] = {}
        self._num_stepped = 0
        self._lost = ""  # a sharded parameter whose data was replaced while it was gathered
        self._has_moved = False  # a piece is elsewhere, for good: what is stepped there reaches nothing
        self._shown: list[Callable[[bool], None]] = []  # to be told when the parameters are plain again
        self._hooks: list[RemovableHandle] = []

    def ask(self, moment: str, engine: Engine) -> None:
        """Refuse what must not be at this moment; then remember what is.

        Raises:
            ValueError: at 'model' and 'built': what cannot be trained.
            RuntimeError: a rule of the table.
        """
        if moment == "model":
            check_free(engine.module)
            if engine.strategy.keeps_pieces:  # sharded: of what is rounded it becomes so later
                check_not_scripted(engine.module)
            return
        if moment == "built":
            self._build(engine)
        if engine.num_open and moment == "left full":
            return  # an inner block
        refusal = None if moment in ("built", "closed") else self._first_broken(moment, engine)
        if self._is_too_early(moment, engine):
            refusal = RuntimeError(OPEN.format(verb=moment))
        if moment in ("forward", "step", "full", "save") and (name := self._taken_out(engine)):
            refusal = RuntimeError(REPLACED.format(name=name))
        if self._lost and moment not in ("left full", "closed"):
            refusal = RuntimeError(LOST.format(name=self._lost))
        self._lost = ""
        if moment in ("step", "stepped") and self._is_spread(engine):
            refusal = refusal or self._frozen(moment, engine)
        if moment == "step" and refusal is None:
            self._check_groups(engine)
            if engine.strategy.precision.compute is torch.float16 and not engine.loss_is_scaled:
                warnings.warn(
                    "precision: float16 without a GradScaler loses gradients below 6e-8; use engine.backward("
                    "scaler.scale(loss)) and scaler.step(engine), or precision='bf16'",
                    stacklevel=4,
                )
        self._place(moment, engine)
        is_elsewhere = engine.strategy.steps_pieces or any(comm.num_ranks > 1 for comm in engine.comms)
        engine.step_tensors().are_behind = is_elsewhere and engine.gradients.are_local
        if self._claim is not None and moment in ("update", "stepped", "install", "installed"):
            self._claim.is_stepping = moment == "update"
            self._claim.is_installing = moment == "install"
        if moment in ("update", "stepped") and self._is_spread(engine):
            for name, param in engine.params.items():
                if moment == "update":
                    StubbedParameter.hide(param, name, HALF_STEPPED.format(name=name))
                else:
                    StubbedParameter.show(param)
        if moment in _CHANGED:
            self._remember(moment, engine)
        if moment == "closed":
            self._release()
        if refusal is not None:
            raise refusal

    def optimizer(self, make: OptimizerFn, engine: Engine) -> torch.optim.Optimizer:
        """What a user's function builds over the engine's tensors.

        Raises:
            ValueError: it does not fit them; on all ranks.
        """
        over = engine.sharded_over
        cut = Cut(
            getattr(engine.strategy, "partition", Partition.ELEMENTS),
            is_spread=over is not None,
            is_sliced=any(one.num_ranks > 1 for one in engine.slices.values()),
        )

        shapes = {name: tuple(param.shape) for name, param in engine.params.items()}
        shapes |= {name: one.full_shape for name, one in engine.slices.items() if name in shapes}

        def build() -> torch.optim.Optimizer:
            return fitting_optimizer(make, engine.step_tensors(), shapes, cut)

        # Pieces differ by rank, so one rank may refuse its own while another accepts.
        return build() if over is None else all_or_none(engine.comms, engine.mesh.device, build)

    def _build(self, engine: Engine) -> None:
        strategy = engine.strategy
        self._num_stepped = _count(engine)
        homes = [vars(module).get("_parameters") for module in engine.module.modules()]
        # TorchScript has something else there.
        self._homes = [(home, *item) for home in homes if isinstance(home, dict) for item in home.items()]
        self._is_rounded = strategy.keeps_pieces
        self._is_sharded = hasattr(strategy, "units")
        if self._is_sharded:
            for unit in strategy.units:  # type: ignore[attr-defined]
                for shards in unit.shards:
                    self._watch(shards)
            modules = [module for module in engine.module.modules() if module._parameters]
            self._hooks += [module.register_load_state_dict_pre_hook(refuse_loading) for module in modules]
        if strategy.steps_pieces:
            guard_groups(engine.optimizer, engine.step_tensors())
        self._claim = Claim(
            engine, engine.params.values(), engine.optimizer, lambda other: self._before_others_step(other, engine)
        )

    def _watch(self, shards: Shards) -> None:
        """Let parameters refuse to be used while they are sharded."""

        def show(is_shown: bool) -> None:
            for name, param in shards.params.items():
                if is_shown:
                    StubbedParameter.show(param)
                    continue
                if name in shards.full and param.data_ptr() != shards.full[name].data_ptr():
                    self._lost = self._lost or name
                StubbedParameter.hide(param, name)

        shards.watchers.append(show)
        show(False)
        self._shown.append(show)

    def _first_broken(self, moment: str, engine: Engine) -> RuntimeError | None:
        for rule in RULES:
            if self._is_asked(rule, moment, engine) and self._counts(rule, engine):
                tensors = dict(engine.step_tensors().items()) if rule.of == "piece" else engine.params
                for name, tensor in tensors.items():
                    before = self._marks[rule.of].get(name)
                    if (
                        before is not None
                        and before.changed(rule.change, mark(tensor))
                        and self._is_sliced(rule, name, engine)
                    ):
                        self._has_moved |= (rule.of, rule.change) == ("piece", "place")
                        return RuntimeError(rule.text.format(name=name))
        return None

    @staticmethod
    def _is_too_early(moment: str, engine: Engine) -> bool:
        if not engine.num_open or not engine.strategy.keeps_pieces:
            return False
        compute = engine.strategy.precision.compute
        # A forward may read what is shown, unless that has another dtype than its input.
        is_cast = compute is not None and any(param.dtype != compute for param in engine.params.values())
        return moment in ("backward", "step") or (moment == "forward" and is_cast)

    def _taken_out(self, engine: Engine) -> str:
        """The name of a parameter that the module has lost, past the hooks that refuse it: as parametrizations do."""
        if all(home.get(key) is param for home, key, param in self._homes):
            return ""
        left = set(engine.module.parameters())  # under other names, as after pruning
        return next((name for name, param in engine.params.items() if param not in left), "")

    @property
    def _is_stepping(self) -> bool:
        return self._claim is not None and self._claim.is_stepping

    def _is_asked(self, rule: Rule, moment: str, engine: Engine) -> bool:
        if moment not in rule.at:
            return False
        if rule.of == "piece":
            if rule.where is Where.SHOWN and not engine.num_open and moment != "left full":
                return False
            return moment == "stepped" or not self._is_stepping  # they may be on a visit, and are stepped
        # What is written into full parameters may be kept, and until then it is right to compute with.
        return rule.change not in ("place", "version") or not engine.num_open or moment == "step"

    def _counts(self, rule: Rule, engine: Engine) -> bool:
        if rule.gradients and engine.gradients not in rule.gradients:
            return False
        if rule.change == "gradient_version" and all(comm.num_ranks == 1 for comm in engine.comms):
            # One process alone may change its sums, which are the means; unless earlier ones are elsewhere.
            return engine.strategy.steps_pieces and engine.gradients is Gradients.MEANS_AND_LOCAL
        if rule.where is Where.FLAT and self._is_sharded:
            return False
        if rule.where is Where.SHOWN:
            return self._is_sharded
        if rule.where in (Where.PIECES, Where.FLAT):
            # One process alone writes into the parameters themselves, unless these are others.
            return (engine.strategy.steps_pieces and (rule.of, rule.change) != ("piece", "version")) or self._is_spread(
                engine
            )
        if rule.where is Where.ROUNDED:
            return self._is_rounded and not self._is_sharded
        return rule.where is not Where.NOT_IN_PLACE or self._is_rounded

    def _is_spread(self, engine: Engine) -> bool:
        return engine.strategy.steps_pieces and (engine.num_data_ranks > 1 or self._is_rounded) and not self._is_sharded

    @staticmethod
    def _is_sliced(rule: Rule, name: str, engine: Engine) -> bool:
        return rule.where is not Where.SLICED or (name in engine.slices and engine.slices[name].num_ranks > 1)

    def _frozen(self, moment: str, engine: Engine) -> RuntimeError | None:
        """Where a bucket is frozen, nobody gathers what has become of its pieces."""
        for division in engine.divisions():
            names = division.layout.names
            if not any(engine._is_due(engine.params[name]) for name in names):
                for name in names:
                    piece = engine.step_tensors().by_name(name)
                    is_written = self._marks["piece"][name].version != piece._version
                    if is_written or (moment == "step" and piece.grad is not None):
                        return RuntimeError(FROZEN.format(name=name))
        return None

    def _check_groups(self, engine: Engine) -> None:
        for name, tensor in engine.step_tensors().items():
            if tensor is not engine.params[name] and engine.params[name] in engine.optimizer.state:
                raise RuntimeError(
                    f"engine.optimizer.state: it has an entry for the module's {name!r}, of which the optimizer steps "
                    f"a piece; write engine.optimizer.state[engine.step_tensors().by_name({name!r})]"
                )
        if _count(engine) != self._num_stepped:
            # A group was added: of a tensor that the engine does not know, nobody averages the gradients.
            check_optimizer(engine.optimizer, engine.step_tensors())
            self._num_stepped = _count(engine)

    def _place(self, moment: str, engine: Engine) -> None:
        """Placeholders at ``.grad`` while the mean is at the piece; away before autograd adds."""
        if not engine.strategy.steps_pieces:
            return
        if moment == "means" or (moment == "local" and self._is_rounded and not self._is_sharded):
            for name, param in engine.params.items():
                if param.requires_grad and param.grad is None:
                    placeholder = self._placeholders.get(name)
                    if placeholder is None or placeholder.dtype != param.dtype:
                        placeholder = self._placeholders[name] = PlaceholderGradient.of(name, param)
                    param.grad = placeholder
        elif moment in ("backward", "reduce", "zero_grad", "closed"):
            for param in engine.params.values():
                if isinstance(param.grad, PlaceholderGradient):
                    param.grad = None

    def _remember(self, moment: str, engine: Engine) -> None:
        kinds: dict[str, dict[str, torch.Tensor]] = {"parameter": dict(engine.params)}
        if engine.strategy.steps_pieces:
            kinds["piece"] = dict(engine.step_tensors().items())
        for kind, tensors in kinds.items():
            known = self._marks.setdefault(kind, {})
            is_known = {}
            if kind == "piece":
                is_shown = moment == "full" and self._is_sharded and not engine.num_open
                is_known["version"] = is_known["trains"] = is_shown or (moment in _WRITTEN and moment != "left full")
                is_known["place"] = not (self._has_moved or self._is_stepping)
            elif not self._is_sharded:
                is_known["version"] = moment in _WRITTEN
            fields = tuple(field for field in _CHANGED[moment] if is_known.get(field, True))
            for name, tensor in tensors.items():
                now = mark(tensor)
                known[name] = known.get(name, now)._replace(**{field: getattr(now, field) for field in fields})
                if moment == "stepped":  # they are spent, and some optimizers change them
                    known[name] = known[name]._replace(gradient_version=-1)

    @staticmethod
    def _before_others_step(optimizer: torch.optim.Optimizer, engine: Engine) -> None:
        several, pieces = engine.num_data_ranks > 1, engine.step_tensors()
        check_others_step(
            optimizer, engine.params, pieces, engine.name, is_early=several and engine._running,
            is_behind=several and engine.gradients.are_local and not engine._running,
        )  # fmt: skip
        others = tensors_of(optimizer)
        increment_version([one for one in pieces if one.grad is not None and id(one) in others])  # fused kernels do not

    def _release(self) -> None:
        if self._claim is not None:
            self._claim.release()
            self._claim = None
        for show in self._shown:
            show(True)
        for hook in self._hooks:
            hook.remove()


def _count(engine: Engine) -> int:
    return sum(len(group["params"]) for group in engine.optimizer.param_groups)
