"""Imports point down only, nothing imports in a circle, and no file grows past 400 lines."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = "knit_data"
ROOT = Path(__file__).parents[1]
MAX_LINES = 400

# Lowest first. A name is a module or a whole sub-package; the package's own __init__ lies above them all.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("trajectory", "placement", "pixels", "infos", "errors"),
    (
        *("quotas", "seats", "staleness", "policy", "groups", "ledger", "admission"),
        *("explain", "demand", "launching", "affinity", "packing", "planning", "layout", "recent", "tracing", "ops"),
    ),
    ("store",),
    (
        *("stream", "truncate", "flights", "intake", "sampler"),
        *("exchange", "share", "arena", "device", "frame", "blueprint", "media", "batch", "collate", "prefetch"),
        *("reclaim", "background"),
    ),
    ("surroundings", "grad_sync", "features", "minibatch", "encoder", "loader", "pacing", "simulation"),
    ("integrations", "__main__"),
)
TOP = len(LAYERS)


def modules_of(package: Path) -> dict[str, Path]:
    """Dotted name -> file, for a package folder."""
    found = {}
    for file in sorted(package.rglob("*.py")):
        parts = (package.name, *file.relative_to(package).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports_of(module: str, file: Path, modules: dict[str, Path]) -> set[str]:
    """The package's modules that a file names in an import, wherever it stands: inside functions and under
    TYPE_CHECKING too. ``from package import name`` is the module ``package.name`` where there is one."""
    root = module.split(".")[0]
    named = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        if isinstance(node, ast.Import):
            named.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
                package = package[: len(package) - node.level + 1]
                base = ".".join([*package, base] if base else package)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                named.add(inner if inner in modules else base)
    return {name for name in named if name.split(".")[0] == root}


def layer_of(module: str) -> int | None:
    parts = module.split(".")
    if len(parts) == 1:
        return TOP
    return next((layer for layer, names in enumerate(LAYERS) if parts[1] in names), None)


def circle_in(graph: dict[str, set[str]]) -> list[str] | None:
    """One circle of imports, first module repeated at the end, or None."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str] | None:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return None
        for target in sorted(graph.get(module, ())):
            circle = visit(target, [*path, module])
            if circle is not None:
                return circle
        done.add(module)
        return None

    return next((circle for module in sorted(graph) if (circle := visit(module, [])) is not None), None)


def complaints_about(package: Path) -> list[str]:
    modules = modules_of(package)
    graph = {module: imports_of(module, file, modules) for module, file in modules.items()}
    complaints = []
    for module, targets in graph.items():
        layer = layer_of(module)
        if layer is None:
            complaints.append(f"{module} is in no layer; give it one in LAYERS of tests/test_layers.py")
            continue
        for target in sorted(targets):
            below = layer_of(target)
            if below is None:
                if target not in modules:
                    complaints.append(f"{module} imports {target}, which does not exist")
            elif below > layer:
                complaints.append(f"{module} (layer {layer}) imports {target} (layer {below}); imports point down only")
    circle = circle_in(graph)
    if circle is not None:
        complaints.append(f"imports in a circle: {' -> '.join(circle)}")
    return complaints


def test_imports_point_down_and_never_in_a_circle() -> None:
    complaints = complaints_about(ROOT / "src" / PACKAGE)
    assert not complaints, "\n".join(complaints)


def test_files_stay_small() -> None:
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "csrc").glob("*.cpp"), *(ROOT / "csrc").glob("*.h")]
    lines = {str(file.relative_to(ROOT)): len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    long = {name: count for name, count in lines.items() if count > MAX_LINES}
    assert lines and not long, f"more than {MAX_LINES} lines; split the stage that has two reasons to change: {long}"


# -- the rule itself can fail -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"__init__": "from knit_data.loader import L", "loader": "from knit_data import errors", "errors": ""}, []),
        ({"ops/__init__": "from .gather import g", "ops/gather": "from ..errors import E", "errors": ""}, []),
        ({"store/__init__": "", "store/local": "from .backend import B", "store/backend": "import numpy"}, []),
        (
            {"errors": "import knit_data.ops.gather", "ops/__init__": "", "ops/gather": ""},
            ["knit_data.errors (layer 0) imports knit_data.ops.gather (layer 1)"],
        ),
        (
            {"planning": "def f():\n    from .store import s", "store/__init__": ""},
            ["knit_data.planning (layer 1) imports knit_data.store (layer 2)"],
        ),
        (
            {"ops/pack": "if TYPE_CHECKING:\n    from .. import loader", "loader": ""},
            ["knit_data.ops.pack (layer 1) imports knit_data.loader (layer 4)"],
        ),
        ({"loader": "from knit_data import Loader"}, ["knit_data.loader (layer 4) imports knit_data (layer 6)"]),
        ({"misc": ""}, ["knit_data.misc is in no layer"]),
        ({"loader": "import knit_data.gone"}, ["knit_data.loader imports knit_data.gone, which does not exist"]),
        (
            {"store/__init__": "", "store/a": "from . import b", "store/b": "from knit_data.store.a import x"},
            ["imports in a circle: knit_data.store.a -> knit_data.store.b -> knit_data.store.a"],
        ),
        (
            {"store/__init__": "from knit_data.store.a import x", "store/a": "from knit_data.store import y"},
            ["imports in a circle: knit_data.store -> knit_data.store.a -> knit_data.store"],
        ),
    ],
)
def test_the_rule_sees(tmp_path: Path, files: dict[str, str], expected: list[str]) -> None:
    package = tmp_path / PACKAGE
    for name, text in {"__init__": "", **files}.items():
        file = package / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    complaints = complaints_about(package)
    assert len(complaints) == len(expected)
    for complaint, text in zip(complaints, expected, strict=True):
        assert complaint.startswith(text)
