"""The layers of shared/DESIGN.md, section 1, read from the source: imports point only downward."""

import ast
import os
import re
import subprocess
import sys
from fnmatch import fnmatch
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from tests.launch.helpers import script_env, start_forked

PACKAGE = Path(__file__).parent.parent / "shardlab"
READING = PACKAGE.parent / "notebooks" / "guide" / "reading.md"
NUMBERS = {"installed", "partition", "records", "vocabulary"}
# What each room may import, besides itself. A room that is not here fails: decide where it belongs.
MAY_IMPORT = {
    **dict.fromkeys(("vocabulary", "installed", "field_types", "meta_device", "units"), frozenset()),
    **dict.fromkeys(("records", "partition"), frozenset({"vocabulary"})),
    **dict.fromkeys(("comm", "models", "data_sets", "analysis"), NUMBERS),
    "planner": NUMBERS,
    "forecast": NUMBERS | {"field_types", "planner"},
    "why": NUMBERS | {"analysis", "schedules"},
    "plots": NUMBERS | {"analysis", "schedules"},
    "schedules": {"partition", "vocabulary"},
    "context": {"comm", "vocabulary"},
    "pipeline": {"comm", "engines", "partition", "schedules", "vocabulary"},
    "engines": {"comm", "meta_device", "partition", "units", "vocabulary"},
    "tensor_parallel": {"comm", "meta_device", "partition", "vocabulary"},
    "trace": {"analysis", "comm", "units", *NUMBERS},
    "export": {"analysis", "trace", *NUMBERS},
    "launch": {"comm", *NUMBERS},
    "testing": {"comm", "engines", "launch", "models", "vocabulary"},
    "optimizers": {"comm", "engines", "partition", "vocabulary"},
    "dry": {"comm", "engines", "optimizers", "partition", "planner", "records", "tensor_parallel", "vocabulary"},
}
LOWER = set(MAY_IMPORT)
MAY_IMPORT["experiment"] = LOWER
MAY_IMPORT |= dict.fromkeys(("bench", "recording", "course"), LOWER | {"experiment"})
MAY_IMPORT["same"] = LOWER | {"experiment", "recording"}
MAY_IMPORT["course"] |= {"recording", "same"}
MAY_IMPORT["cli"] = LOWER | {"bench", "course", "experiment", "recording", "same"}
MAY_IMPORT["__main__"] = {"cli"}
MAY_IMPORT["__init__"] = LOWER | {"experiment", "recording"}

WITHOUT_TORCH = (
    "analysis", "export", "forecast", "partition", "planner", "plots", "records", "schedules", "vocabulary", "why",
)  # fmt: skip
# torch.distributed without sending anything: groups begin and end, and are asked who they are.
MODULES = ("dist", "torch.distributed", "distributed_c10d", "torch.distributed.distributed_c10d")
NOT_COLLECTIVES = {
    "DTensor", "FSDPModule", "FileStore", "FullyShardedDataParallel", "ProcessGroup", "ReduceOp", "Work", "__file__",
    "checkpoint", "compute_local_shape_and_global_offset", "destroy_process_group", "device_mesh", "distributed_c10d",
    "get_backend", "get_process_group_ranks", "get_rank", "get_world_size", "init_process_group", "rendezvous",
    "state_dict_saver",
}  # fmt: skip
# The one exception: peers wrap torch's own engines, which send through a group that comm has made for them.
PEERS = "shardlab.engines.peers."
OF_TORCHS_ENGINES = {
    "ColwiseParallel", "DTensor", "DeviceMesh", "PipelineStage", "Replicate", "RowwiseParallel", "Shard",
    "ZeroRedundancyOptimizer", "_PipelineScheduleRuntime", "distribute_tensor", "fully_shard", "parallelize_module",
}  # fmt: skip


@cache
def modules() -> dict[str, ast.Module]:
    return {
        ".".join(("shardlab", *path.relative_to(PACKAGE).with_suffix("").parts)): ast.parse(path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def is_package(name: str) -> bool:
    return f"{name}.__init__" in modules() or name == "shardlab"


@cache
def imported(tree: ast.Module, *, also_for_types: bool = False) -> set[str]:
    """Full names of all modules a file imports, also inside functions; not those for the type checker alone."""
    found: set[str] = set()
    for node in ast.walk(tree) if also_for_types else running_code(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer"
            base = node.module or ""
            found |= {
                f"{base}.{alias.name}" if is_package(base) and is_module(f"{base}.{alias.name}") else base
                for alias in node.names
            }
    return found


def is_module(name: str) -> bool:
    return name in modules() or f"{name}.__init__" in modules()


def running_code(node: ast.AST):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING":
            continue
        yield child
        yield from running_code(child)


def test_imports_point_downward() -> None:
    for module, tree in modules().items():
        own = room(module)
        assert own in MAY_IMPORT, f"room {own!r} has no place in the layers"
        others = {room(name) for name in imported(tree) if name.split(".")[0] == "shardlab"} - {own}
        assert others <= MAY_IMPORT[own], f"{module} imports {sorted(others - MAY_IMPORT[own])}"


def test_what_is_trained_run_planned_and_told_is_known_in_this_order() -> None:
    order = ("options", "trained", "directory", "config", "run", "planned", "told", "comparison")
    for module, tree in modules().items():
        own = module.split(".")[2] if room(module) == "experiment" else "__init__"
        if own != "__init__":
            inside = {name.split(".")[2] for name in imported(tree) if name.startswith("shardlab.experiment.")}
            assert inside <= {*order[: order.index(own) + 1]}, module


def test_rooms_have_no_cycle() -> None:
    graph: dict[str, set[str]] = {}
    for module, tree in modules().items():
        if room(module) != "__init__":  # the package's own names are imported when they are used
            uses = {room(name) for name in imported(tree) if name.split(".")[0] == "shardlab"}
            graph.setdefault(room(module), set()).update(uses - {room(module), "__init__"})
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError
    assert order.index("partition") < order.index("comm") < order.index("engines") < order.index("experiment")


@cache
def graph() -> dict[str, set[str]]:
    """The files of the package that each file imports, for the type checker alone too; a room is its __init__.

    Without the package's own __init__: it gives the version to whoever asks, and its names when they are used.
    """
    return {
        module: {
            f"{name}.__init__" if is_package(name) else name
            for name in imported(tree, also_for_types=True)
            if name.startswith("shardlab.")
        }
        - {module}
        for module, tree in modules().items()
    }


def closure(start: str) -> set[str]:
    """The files that reading this one leads to; what a package's __init__ adds to an import is not counted."""
    found: set[str] = set()
    ahead = [start]
    while ahead:
        new = graph()[ahead.pop()] - found
        found |= new
        ahead += new
    return found


STRATEGY_FILES = ("single", "ddp", "bucketed", "zero1", "zero2", "zero3", "fsdp")


def test_no_files_import_each_other_in_a_circle() -> None:
    reached = {module: closure(module) for module in graph()}
    assert not [module for module in reached if module in reached[module]]


def test_engines_train_without_checkpoints_and_without_guards() -> None:
    """They are handed to the engines by the package's __init__, which no engine imports."""
    beside = ("shardlab.engines.checkpoint", "shardlab.engines.guards")
    for name in ("engine", *STRATEGY_FILES):
        assert not [found for found in closure(f"shardlab.engines.{name}") if found.startswith(beside)], name


def test_engines_import_no_records_tables_or_pictures_and_pictures_and_arithmetic_no_torch() -> None:
    for module, tree in modules().items():
        names, tops = imported(tree), {name.split(".")[0] for name in imported(tree)}
        if room(module) in ("engines", "tensor_parallel", "comm"):
            assert not tops & {"pandas", "plotly", "pyarrow"}, module
            assert not any(name.startswith(("shardlab.trace", "shardlab.records")) for name in names), module
        assert room(module) not in WITHOUT_TORCH or "torch" not in tops, module


# JupyterLab and what comes with it, and what nothing needs: each is absent where its entry is None.
OF_NOTEBOOKS = ("jupyterlab", "jupyter_server", "jupyter_client", "jupyter_core", "notebook", "nbformat", "nbclient")
OF_NOTEBOOKS += ("nbconvert", "ipykernel", "IPython", "ipywidgets", "tqdm")


def test_scripts_and_the_command_line_need_no_jupyter(tmp_path: Path) -> None:
    """And engines no pandas. That a saved run is read without torch, tests/cli/test_cli_records.py shows."""
    absent = f"import sys\nsys.modules |= dict.fromkeys({OF_NOTEBOOKS})\n"
    names = [
        name.removesuffix(".__init__") for name in modules() if ".widgets." not in name and room(name) != "__main__"
    ]
    code = f"""{absent}
import shardlab.engines
assert "pandas" not in sys.modules
import importlib, shardlab
[importlib.import_module(name) for name in {names}]
assert not [name for name in shardlab.__all__ if isinstance(getattr(shardlab, name), type(shardlab))]
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=script_env())
    words = "compare --strategies ddp --ranks 1 --steps 1 --text grammar --device cpu --out run"
    script, printed = tmp_path / "compare.py", tmp_path / "printed.txt"
    script.write_text(f"{absent}from shardlab.cli import app\napp({words.split()}, standalone_mode=False)\n")
    compares = start_forked(script, cwd=tmp_path, output=printed)
    compares.join(120)
    assert compares.exitcode == 0, printed.read_text()
    assert (tmp_path / "run" / "report.html").exists()


def test_only_comm_calls_collectives() -> None:
    in_comm = set()
    for module, tree in modules().items():
        for node in ast.walk(tree):
            if room(module) == "comm":
                in_comm.add(node.attr if isinstance(node, ast.Attribute) else "")
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
                allowed = NOT_COLLECTIVES | (OF_TORCHS_ENGINES if module.startswith(PEERS) else set())
                assert {alias.name for alias in node.names} <= allowed, f"{module}:{node.lineno}"
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in MODULES:
                may = node.attr in NOT_COLLECTIVES or node.attr.startswith("is_")
                assert may, f"{module}:{node.lineno} uses torch.distributed.{node.attr}"
    assert {"all_reduce", "broadcast", "all_to_all_single"} <= in_comm - NOT_COLLECTIVES, "this test sees them"


def test_no_collective_inside_try() -> None:
    """A rank that catches and goes on leaves the others waiting. (``finally`` alone is fine.)"""
    verbs = {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "barrier"}
    for module, tree in modules().items():
        for node in ast.walk(tree) if room(module) in ("engines", "tensor_parallel") else ():
            if isinstance(node, ast.Try) and node.handlers:
                calls = [call.func for call in ast.walk(node) if isinstance(call, ast.Call)]
                called = {call.attr for call in calls if isinstance(call, ast.Attribute)}
                assert not called & verbs, f"{module}:{node.lineno}"


def test_pytest_leaves_no_folder_of_tests_out(pytestconfig):
    tests = Path(__file__).parent
    folders = {part for path in tests.rglob("test_*.py") for part in path.relative_to(tests).parts[:-1]}
    patterns = pytestconfig.getini("norecursedirs")
    assert not [folder for folder in folders if any(fnmatch(folder, pattern) for pattern in patterns)]


def reading_list() -> list[str]:
    """Modules of the guide's reading list, in its order; a bullet begins with the room, and ``../`` leaves it."""
    text = READING.read_text().split("With all that they stand on")[1].split("Each strategy's first lines")[0]
    found = []
    for bullet in text.split("\n- ")[1:]:
        room, *names = re.findall(r"`([^`]+)`", bullet)
        found += [".".join(("shardlab", *Path(os.path.normpath(f"{room}/{name}")).parts)) for name in names]
    return found


def read_first(module: str) -> set[str]:
    """What a file imports; of what it imports through a package, what that package's __init__ imports."""
    through = {name for used in graph()[module] if used.endswith(".__init__") for name in graph()[used]}
    return {name for name in graph()[module] | through if not name.endswith(".__init__")}


def test_the_reading_list_is_complete_and_in_order() -> None:
    """Whoever reads it meets no import that was not read before, and no strategy is left out."""
    known: set[str] = set()
    for module in reading_list():
        assert not read_first(module) - known, f"{module} imports what the list has later, or not at all"
        known.add(module)
    assert {f"shardlab.engines.{name}" for name in STRATEGY_FILES} <= known


def test_the_reading_list_says_how_long_it_is() -> None:
    strategies = [f"shardlab.engines.{name}" for name in STRATEGY_FILES[1:]]
    for words, files in ((r"`fsdp`, ([\d,]+) lines", strategies), (r"they stand on, ([\d,]+) lines", reading_list())):
        said = int(re.search(words, READING.read_text())[1].replace(",", ""))
        lines = sum((PACKAGE.parent / f"{module.replace('.', '/')}.py").read_text().count("\n") for module in files)
        assert abs(said - lines) <= 0.03 * lines, f"{READING.name} says {said}, and the files have {lines}"


def test_a_strategy_pulls_in_few_files() -> None:
    """For the type checker too; a package's __init__ is no file to read, but what it imports is."""
    for files, limit in ((("ddp",), 15), (STRATEGY_FILES, 35)):
        found = set().union(*(closure(f"shardlab.engines.{name}") for name in files))
        assert len([name for name in found if not name.endswith(".__init__")]) <= limit
