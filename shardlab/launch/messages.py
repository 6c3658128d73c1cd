"""What a pool and its ranks send each other: five messages, and the objects in them as bytes.

Functions, arguments and results arrive also where the other side cannot import their module. cloudpickle sends what a
notebook cell or a script defines by value. So does this file with code of every module that is not installed (a test
file, a ``helpers.py`` beside the notebook): a warm rank then always runs the code as it is now, not as it was when the
rank first imported it. Installed packages and shardlab itself go by name.
"""

import importlib
import io
import linecache
import pickle
import site
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch.storage import TypedStorage

from shardlab.installed import PACKAGE

INSTALLED = tuple(
    {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(), site.getusersitepackages(), str(PACKAGE),
    }
)  # fmt: skip


# Torch pickles tensors of these, and then cannot load them: an AttributeError.
_NEW_DTYPES = ("torch.uint16", "torch.uint32", "torch.uint64", "torch.float8", "torch.float4")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Payload:
    """A pickled object and the text of the notebook cells its functions come from, for tracebacks on the other side."""

    blob: bytes
    sources: dict[str, str] = field(default_factory=dict)
    what: str = "it"  # in an error


@dataclass(frozen=True)
class Task:
    """To a rank: call a function. ``call`` holds (function, args, kwargs), the others are the parent's current ones."""

    call: Payload
    sys_path: tuple[str, ...] = field(default_factory=lambda: tuple(sys.path))
    folder: Path = field(default_factory=Path.cwd)
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)


@dataclass(frozen=True)
class Stop:
    """To a rank: leave the group and exit."""


@dataclass(frozen=True)
class Answer:
    """From a rank: what the function returned. The first one of each rank is empty and says that the group is up."""

    result: Payload


@dataclass(frozen=True)
class Note:
    """From a rank, while its function runs: what it gave to ``emit``."""

    message: Payload


class Texts(NamedTuple):
    """An error's traceback.

    Attributes:
        whole: every frame.
        of_user: only the frames of the user's own files and cells. If there are none, it is empty for a ValueError,
            whose message says what to change, and the same as ``whole`` for other errors, which are not the user's.
        num_left_out: frames that are only in ``whole``.
    """

    whole: str
    of_user: str
    num_left_out: int


@dataclass(frozen=True)
class Failure:
    """From a rank: an exception. ``time_ns`` orders the failures of several ranks."""

    rank: int
    time_ns: int
    exception_type: str
    summary: str
    texts: Texts
    exception: Payload | None


def pack(value: object, what: str) -> Payload:
    """Pickle ``value``; CUDA tensors become CPU tensors, so that no process initialises CUDA by receiving one.

    Args:
        value: anything cloudpickle takes.
        what: how to call it in an error, for example ``"the result of rank 1"``.

    Raises:
        TypeError: it cannot be pickled.
    """
    try:
        return _dump(value, what, by_value=True)
    except Exception as error:
        # A module's own lock or handle cannot go by value, yet the other side may well be able to import it by name.
        try:
            return _dump(value, what, by_value=False)
        except Exception:
            raise TypeError(
                f"{what} cannot be pickled ({type(error).__name__}: {error}); send and return tensors, numbers, "
                "strings, lists, dicts, functions and classes, and open files, locks and generators inside the rank"
            ) from error


def unpack(payload: Payload) -> Any:
    """The object that was packed. The text of its cells goes where tracebacks look for it.

    Raises:
        TypeError: it was pickled, and what its class or ``__reduce__`` says does not make it again.
    """
    for file, text in payload.sources.items():
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    try:
        return pickle.loads(payload.blob)
    except Exception as error:
        raise TypeError(
            f"{payload.what} was pickled and cannot be unpickled ({type(error).__name__}: {error}); send and return "
            "what can be made again from what it pickles, such as tensors, numbers, strings, lists and dicts"
        ) from error


def _dump(value: object, what: str, *, by_value: bool) -> Payload:
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, by_value)
    try:
        pickler.dump(value)
    finally:
        pickler.forget_modules()
    return Payload(buffer.getvalue(), pickler.sources, what)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, by_value: bool) -> None:
        super().__init__(file)
        self.sources: dict[str, str] = {}
        self._storages: dict[int, TypedStorage] = {}  # those that are pickled, which stay alive, by address
        self._by_value = by_value
        self._registered: list[ModuleType] = []

    def reducer_override(self, value: object) -> object:
        # A parameter is left to torch: it keeps class and requires_grad, and its data, a tensor, comes here too.
        if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
            if value.is_cuda:
                host = value.detach().cpu().requires_grad_(value.requires_grad)
                return host.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            if str(value.dtype).startswith(_NEW_DTYPES):
                bits = value.detach().view(_INTEGERS[value.itemsize])
                return _with_dtype, (bits, value.dtype, value.requires_grad)
        if isinstance(value, TypedStorage):
            # Each tensor makes an object of its own for it, of which pickle cannot tell that they are one storage: the
            # rows of a matrix would go as so many matrices, and what shares memory here would not share it there.
            first = self._storages.setdefault(value._untyped_storage._cdata, value)
            if first is not value:
                return _same_storage, (first, value.dtype)
        if isinstance(value, CodeType):
            # Since 3.1.3 cloudpickle leaves out the file: tracebacks, and the lines of collectives, would name none.
            return _code_of_file, (value.co_filename, *self.dispatch_table[CodeType](value))
        if isinstance(value, ModuleType) and sys.modules.get(value.__name__) is value and type(value) is not ModuleType:
            return importlib.import_module, (value.__name__,)  # torch.ops, of a class that cloudpickle does not know
        if isinstance(value, FunctionType | type):
            self._send_by_value(value.__module__)
        if isinstance(value, FunctionType):
            self._keep_source(value.__code__.co_filename)
            if getattr(value, "hooked", False) and not _is_installed(value.__module__):
                return _hooked_step, (value.__wrapped__,)  # type: ignore[attr-defined]
        return super().reducer_override(value)

    def forget_modules(self) -> None:
        # cloudpickle's registry is global: leave it as it was.
        for module in self._registered:
            cloudpickle.unregister_pickle_by_value(module)

    def _send_by_value(self, module_name: str | None) -> None:
        module = sys.modules.get(module_name or "")
        if not self._by_value or module is None or not _is_user_code(module):
            return
        if module.__name__ not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(module)
            self._registered.append(module)

    def _keep_source(self, file: str) -> None:
        entry = linecache.cache.get(file, ())
        # An entry without a modification time was put there by a notebook: no file of that name exists to read.
        if len(entry) == 4 and entry[1] is None:
            self.sources[file] = "".join(entry[2])


def _with_dtype(tensor: torch.Tensor, dtype: torch.dtype, requires_grad: bool) -> torch.Tensor:
    return tensor.view(dtype).requires_grad_(requires_grad)


def _same_storage(storage: TypedStorage, dtype: torch.dtype) -> TypedStorage:
    return TypedStorage(wrap_storage=storage._untyped_storage, dtype=dtype, _internal=True)


def _code_of_file(file: str, make: Callable[..., CodeType], parts: tuple[Any, ...]) -> CodeType:
    return make(*parts).replace(co_filename=file)


def _hooked_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """The ``step`` of an optimizer's class as torch wraps it when the first optimizer of the class is made.

    The wrapper itself is not sent: pickled by value, it would call a copy of the hooks that all optimizers share.
    """
    hooked: Any = torch.optim.Optimizer.profile_hook_step(step)
    hooked.hooked = True
    return hooked  # type: ignore[no-any-return]


def _is_user_code(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return bool(file) and module.__name__ != "__main__" and not _is_installed(module.__name__)


def _is_installed(module_name: str) -> bool:
    file = getattr(sys.modules.get(module_name), "__file__", None)
    return module_name != "__main__" and str(file).startswith(INSTALLED)  # a notebook runs an installed program
