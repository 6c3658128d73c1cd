"""What of a module could be divided, and how: regions that begin with columns and end with rows.

A region is found by the flow of its outputs, whatever its layers are called: query, key and value before an output
projection, gate and up before down, two layers in a row. If one layer makes several projections at once, the graph does
not say how they lie in its output, so there are several forms to try: one after another (``parts``), or interleaved by
head.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice, product, takewhile
from typing import Any

from torch import nn

from shardlab.tensor_parallel.flow import END, START, Flow, is_layer
from shardlab.tensor_parallel.styles import Column, OnSequence, Row, Style, Vocabulary

Form = dict[str, Style]
MAX_FORMS = 8
SMALL = 0.01  # share of all parameters below which an embedding is not worth its message
_HEAD_DIMS = ("head_dim", "head_size", "dim_head", "d_head", "attention_head_size")
_NUM_HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "nhead", "heads")


@dataclass
class Region:
    """Layers that can only be divided together.

    Attributes:
        layers: their names.
        forms: the ways to try that have not been refused, the likeliest first.
        reasons: why others were.
    """

    layers: tuple[str, ...]
    forms: list[Form]
    reasons: list[str] = field(default_factory=list)

    @property
    def form(self) -> Form:
        """The likeliest; nothing if none is left."""
        return self.forms[0] if self.forms else {}

    @property
    def why_not(self) -> str:
        """Why none is left: what was said of the likeliest."""
        return self.reasons[0] if self.reasons and not self.forms else ""

    def refuse(self, form: Form, why_not: str) -> None:
        """Remove a form, and keep the reason."""
        self.forms.remove(form)
        self.reasons.append(why_not)


def regions_of(module: nn.Module, flow: Flow) -> Iterator[Region]:
    """The regions of a module: embeddings with the heads that give logits, then columns and rows in forward's order."""
    taken: set[str] = set()
    for region in _vocabularies(module, flow):
        taken |= set(region.layers)
        yield region
    for layer in flow.layers:
        rows = flow.consumers(layer)
        columns = flow.feeders[next(iter(rows))] if rows else frozenset()
        if layer in taken or taken & (columns | rows) or not _is_closed(module, flow, columns, rows):
            continue
        taken |= columns | rows
        yield _region(module, flow, _in_order(flow, columns), _in_order(flow, rows))


def alike_together(module: nn.Module, regions: Iterable[Region]) -> list[Region]:
    """Regions that differ in numbers only, such as those of a transformer's layers, as one, which is divided alike."""
    kinds: dict[object, list[Region]] = {}
    for region in regions:
        sizes = tuple(tuple(param.shape for param in module.get_submodule(name).parameters()) for name in region.layers)
        key = (tuple(map(without_numbers, region.layers)), sizes, len(region.forms), region.why_not)
        kinds.setdefault(key, []).append(region)
    return [
        Region(
            tuple(name for region in alike for name in region.layers),
            [merged(forms) for forms in zip(*(region.forms for region in alike), strict=True)],
            alike[0].reasons,
        )
        for alike in kinds.values()
    ]


def merged(forms: Iterable[Form]) -> Form:
    """Several forms as one."""
    return {name: style for form in forms for name, style in form.items()}


def without_numbers(name: str) -> str:
    """A name with ``*`` for each number in it."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _is_closed(module: nn.Module, flow: Flow, columns: frozenset[str], rows: frozenset[str]) -> bool:
    """Whether the columns feed these rows and nothing else, and nothing else feeds the rows."""
    if not columns or not rows or START in columns or END in rows or columns & rows:
        return False
    linear = all(is_layer(module.get_submodule(name), nn.Linear) for name in columns | rows)
    return (
        linear
        and all(flow.consumers(column) == rows for column in columns)
        and all(flow.feeders[row] == columns for row in rows)
    )


def _region(module: nn.Module, flow: Flow, columns: tuple[str, ...], rows: tuple[str, ...]) -> Region:
    layers = (*columns, *rows)
    widths = {_linear(module, row).in_features for row in rows}
    if len(widths) > 1:
        return Region(layers, [], [f"{', '.join(rows)} take inputs of different widths"])
    inner, why_not = _inner_modules(module, {name for row in rows for name in flow.between[row]})
    if why_not:
        return Region(layers, [], [why_not])
    head_dim = _head_dim(module, layers, width := widths.pop())
    options = [_columns(_linear(module, name).out_features, width, len(columns), head_dim) for name in columns]
    ends: Form = {**{name: Row() for name in rows}, **{name: OnSequence() for name in inner}}
    forms = [dict(zip(columns, chosen, strict=True)) | ends for chosen in islice(product(*options), MAX_FORMS)]
    return Region((*layers, *inner), forms)


def _columns(out_features: int, width: int, num_columns: int, head_dim: int | None) -> list[Column]:
    """How a layer's output features may be cut, where the rows behind it take ``width`` of them."""
    rest = out_features - width
    parts: list[tuple[int, ...]] = []
    if rest > 0 and num_columns == 1:
        if rest % 2 == 0 and rest < 2 * width:
            parts.append((width, rest // 2, rest // 2))  # query, and fewer heads of key and value
        if out_features % width == 0:
            parts.insert(0, (width,) * (out_features // width))  # gate and up; query, key and value
    elif num_columns == 2 and out_features % 2 == 0 and out_features != width:
        parts.append((out_features // 2,) * 2)  # key and value beside a query
    return [*(Column(parts=cut, head_dim=head_dim) for cut in dict.fromkeys(parts)), Column(head_dim=head_dim)]


def _inner_modules(module: nn.Module, params: set[str]) -> tuple[list[str], str]:
    """The modules of the parameters between columns and rows, or why there is no style for them."""
    owners = {name.rpartition(".")[0] for name in params}
    for name in sorted(params):
        owner = module.get_submodule(name.rpartition(".")[0])
        if any(True for child in owner.children() if any(True for _ in child.parameters())):
            return [], (
                f"parameter {name!r} is used where features are in parts, so each rank would have a part of its "
                "gradient; put it into a module of its own"
            )
    return sorted(owners), ""


def _vocabularies(module: nn.Module, flow: Flow) -> Iterator[Region]:
    """Large embeddings with more rows than columns, and linear layers whose output of as many logits is the result."""
    least = SMALL * sum(param.numel() for param in module.parameters())
    called = {name: module.get_submodule(name) for name in flow.layers}
    weights = dict.fromkeys(
        layer.weight
        for layer in called.values()
        if isinstance(layer, nn.Embedding) and layer.num_embeddings > layer.embedding_dim
        and layer.weight.numel() >= least
    )  # fmt: skip
    shapes = {weight.shape for weight in weights}
    weights |= dict.fromkeys(
        layer.weight
        for name, layer in called.items()
        if isinstance(layer, nn.Linear) and layer.weight.shape in shapes and flow.consumers(name) == {END}
    )
    used_apart = {name for names in flow.between.values() for name in names}
    for weight in weights:
        # Every layer that has this weight, also one that is not called: tied layers are divided together.
        form: Form = {
            name: Vocabulary() if isinstance(layer, nn.Embedding) else Column(gather_output=True)
            for name, layer in module.named_modules()
            if isinstance(layer, nn.Embedding | nn.Linear) and layer.weight is weight
        }
        apart = sorted(f"{name}.weight" for name in form if f"{name}.weight" in used_apart)
        if apart:
            yield Region(
                tuple(form), [], [f"{apart[0]!r} is also used outside of its layer, where all of it is needed"]
            )
        else:
            yield Region(tuple(form), [form])


def _head_dim(module: nn.Module, layers: tuple[str, ...], width: int) -> int | None:
    """The width of a head, if the module around the layers says it."""
    columns = zip(*(name.split(".")[:-1] for name in layers), strict=False)
    common = takewhile(lambda parts: len(set(parts)) == 1, columns)
    parent = module.get_submodule(".".join(parts[0] for parts in common))
    for key in _HEAD_DIMS:
        if (size := _whole_number(parent, key)) and width % size == 0:
            return size
    heads = next((number for key in _NUM_HEADS if (number := _whole_number(parent, key))), None)
    return width // heads if heads and width % heads == 0 else None


def _whole_number(owner: Any, key: str) -> int | None:
    value = getattr(owner, key, None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _in_order(flow: Flow, names: frozenset[str]) -> tuple[str, ...]:
    return tuple(name for name in flow.layers if name in names)


def _linear(module: nn.Module, name: str) -> nn.Linear:
    layer = module.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    return layer
