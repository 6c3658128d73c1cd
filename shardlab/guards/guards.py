"""Guards beside an engine: one snapshot of all that it owns, compared at the engine's verbs with a table of rules.

Delete this room and every right program still trains, bit for bit the same. What a rule refuses on one rank, all ranks
refuse in the same verb: the engine keeps the refusal until its next flag.
"""

import torch
from torch import nn

from shardlab.comm.communicator import Communicator
from shardlab.engines.checks import check_not_scripted, check_optimizer, check_others_step
from shardlab.engines.claims import Claim, check_free
from shardlab.engines.placeholder import ParameterSites, PlaceholderGradient, sites_of
from shardlab.engines.step_tensors import guard_groups
from shardlab.guards.optimizers import check_optimizer_fits
from shardlab.guards.rules import RULES, Rule, Where
from shardlab.guards.snapshot import Mark, mark
from shardlab.strategies.engine import Engine
from shardlab.strategies.shards import Shards
from shardlab.vocabulary import Partition

_DATA, _GRADIENTS = ("place", "version", "trains"), ("gradient", "gradient_version")
# What the engine itself, autograd or the optimizer has just changed: to be remembered as it is now.
_CHANGED = {
    "built": _DATA + _GRADIENTS, "local": _DATA + _GRADIENTS, "means": _GRADIENTS, "zero_grad": _GRADIENTS,
    "forwarded": _DATA, "stepped": _DATA, "left full": _DATA,
}  # fmt: skip


class Guards:
    """Asked by one engine at its verbs."""

    def __init__(self) -> None:
        self._marks: dict[str, dict[str, Mark]] = {}
        self._claim: Claim | None = None
        self._placeholders: dict[str, PlaceholderGradient] = {}
        self._num_stepped = 0

    def ask(self, moment: str, engine: Engine) -> None:
        """Refuse what must not be at this moment; then remember what is.

        Raises:
            ValueError: at 'model' and 'built': what cannot be trained.
            RuntimeError: a rule of the table.
        """
        if moment == "model":
            check_free(engine.module)
            return
        if moment == "built":
            self._build(engine)
        refusal = None if moment in ("built", "closed") else self._first_broken(moment, engine)
        if moment == "step" and refusal is None:
            self._check_groups(engine)
        self._place(moment, engine)
        if self._claim is not None:
            self._claim._is_stepping = moment == "step"
            self._claim._is_installing = moment == "install"
            self._claim._depth = 0
        if moment in _CHANGED:
            self._remember(moment, engine)
        if moment == "closed":
            self._release()
        if refusal is not None:
            raise refusal

    def _build(self, engine: Engine) -> None:
        check_optimizer(engine.optimizer, engine.step_tensors())
        strategy, pieces = engine.strategy, engine.sharded_over
        check_optimizer_fits(
            engine.optimizer, getattr(strategy, "partition", Partition.ELEMENTS),
            is_cut=pieces is not None and pieces.num_ranks > 1,
            is_sliced=any(one.num_ranks > 1 for one in engine.slices.values()),
        )  # fmt: skip
        self._num_stepped = _count(engine)
        self._is_rounded = strategy.keeps_pieces
        self._is_sharded = hasattr(strategy, "units")
        if self._is_sharded:
            check_not_scripted(engine.module)
            self._sites = sites_of(engine.module, engine.params)
            for unit in strategy.units:  # type: ignore[attr-defined]
                for shards in unit.shards:
                    self._watch(shards)
        if strategy.steps_pieces:
            guard_groups(engine.optimizer, engine.step_tensors())
        self._claim = Claim(_Owner(engine), engine.params.values(), engine.optimizer)

    def _watch(self, shards: Shards) -> None:
        """Put placeholders in the place of parameters while they are sharded."""
        sites: list[ParameterSites] = [self._sites[name] for name in shards.params]

        def show(is_shown: bool) -> None:
            for site in sites:
                site.put_parameter() if is_shown else site.put_placeholder()

        shards.watchers.append(show)
        show(False)

    def _first_broken(self, moment: str, engine: Engine) -> RuntimeError | None:
        for rule in RULES:
            if moment in rule.at and self._counts(rule, engine):
                tensors = dict(engine.step_tensors().items()) if rule.of == "piece" else engine.params
                for name, tensor in tensors.items():
                    before = self._marks[rule.of].get(name)
                    if (
                        before is not None
                        and before.changed(rule.change, mark(tensor))
                        and self._is_sliced(rule, name, engine)
                    ):
                        return RuntimeError(rule.text.format(name=name))
        return None

    def _counts(self, rule: Rule, engine: Engine) -> bool:
        if rule.gradients and engine.gradients not in rule.gradients:
            return False
        if rule.change == "gradient_version" and all(comm.num_ranks == 1 for comm in engine.comms):
            return False  # one process alone may change its sums, which are the means
        if rule.where is Where.PIECES:
            # One process alone writes into the parameters themselves, unless these are others.
            return (engine.strategy.steps_pieces and (rule.of, rule.change) != ("piece", "version")) or self._is_spread(
                engine
            )
        return rule.where is not Where.NOT_IN_PLACE or self._is_rounded

    def _is_spread(self, engine: Engine) -> bool:
        return engine.strategy.steps_pieces and (engine.num_data_ranks > 1 or self._is_rounded) and not self._is_sharded

    @staticmethod
    def _is_sliced(rule: Rule, name: str, engine: Engine) -> bool:
        return rule.where is not Where.SLICED or (name in engine.slices and engine.slices[name].num_ranks > 1)

    def _check_groups(self, engine: Engine) -> None:
        if _count(engine) != self._num_stepped:
            # A group was added: of a tensor that the engine does not know, nobody averages the gradients.
            check_optimizer(engine.optimizer, engine.step_tensors())
            self._num_stepped = _count(engine)

    def _place(self, moment: str, engine: Engine) -> None:
        """Placeholders at ``.grad`` while the mean is at the piece; away before autograd adds."""
        if not engine.strategy.steps_pieces:
            return
        if moment == "means":
            for name, param in engine.params.items():
                if param.requires_grad and param.grad is None:
                    placeholder = self._placeholders.get(name)
                    if placeholder is None or placeholder.dtype != param.dtype:
                        placeholder = self._placeholders[name] = PlaceholderGradient.of(name, param)
                    param.grad = placeholder
        elif moment in ("backward", "reduce", "zero_grad", "full", "closed"):
            for param in engine.params.values():
                if isinstance(param.grad, PlaceholderGradient):
                    param.grad = None

    def _remember(self, moment: str, engine: Engine) -> None:
        kinds: dict[str, dict[str, torch.Tensor]] = {"parameter": dict(engine.params)}
        if engine.strategy.steps_pieces:
            kinds["piece"] = dict(engine.step_tensors().items())
        fields = _CHANGED[moment]
        for kind, tensors in kinds.items():
            known = self._marks.setdefault(kind, {})
            for name, tensor in tensors.items():
                now = mark(tensor)
                known[name] = known.get(name, now)._replace(**{field: getattr(now, field) for field in fields})

    def _release(self) -> None:
        if self._claim is not None:
            self._claim.release()
            self._claim = None
        if self._is_sharded:
            for site in self._sites.values():
                site.put_parameter()


class _Owner:
    """An engine, as a ``Claim`` asks it; all else is the engine's own."""

    replaces_params = False

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    @property
    def name(self) -> str:
        return self._engine.name

    @property
    def module(self) -> nn.Module:
        return self._engine.module

    @property
    def tensor_comm(self) -> Communicator | None:
        return self._engine.tensor_comm

    def owned(self) -> dict[str, tuple[int, int]]:
        return self._engine.owned()

    def spread_over(self) -> dict[str, tuple[Communicator, ...]]:
        return self._engine.spread_over()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._engine.zero_grad(set_to_none)

    def before_others_step(self, optimizer: torch.optim.Optimizer, *, inside: bool) -> None:
        engine = self._engine
        if not inside:
            several = engine.num_data_ranks > 1
            check_others_step(
                optimizer, engine.params, engine.step_tensors(), engine.name,
                is_early=several and engine._running, is_behind=several and engine.gradients.are_local,
            )  # fmt: skip

    def before_optimizer_step(self) -> None:
        pass

    def after_optimizer_step(self) -> None:
        pass


def _count(engine: Engine) -> int:
    return sum(len(group["params"]) for group in engine.optimizer.param_groups)
