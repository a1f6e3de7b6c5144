"""The rooms: which way imports point, what the core depends on, what the front door shows."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast

ROOT = Path(holdfast.__file__).parent
ORDER = [
    "errors", "devices", "pieces", "identity", "params", "adapters", "ranks", "steps", "untouched", "elsewhere",
    "kernels", "likelihood", "precision", "curvature", "diagnose", "probes", "posterior", "penalty", "rise", "hold",
    "distill", "forecast", "file", "folder", "head", "variational", "predictive", "pruning", "storage", "integrations",
    "bench", "report", "cli",
]  # fmt: skip
CORE = ORDER[: ORDER.index("integrations")]


def rooms_imported(path: Path) -> set[str]:
    """The rooms of this package that a file imports from."""
    inside = path.relative_to(ROOT).parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*inside[: len(inside) - node.level + 1], *(node.module or "").split(".")]
            parts = [part for part in base if part]
            found |= {parts[0]} if parts else {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if room in ("__init__", "__main__"):
        return
    assert room in ORDER, f"{room} has no place in the order of the rooms"
    later = {other for other in rooms_imported(path) if other in ORDER and ORDER.index(other) > ORDER.index(room)}
    assert not later


def test_the_core_imports_torch_and_safetensors_alone():
    """In a fresh interpreter: nothing of the extras is loaded by `import holdfast`."""
    code = (
        "import sys, holdfast; "
        "print([m for m in ('typer', 'rich', 'matplotlib', 'jinja2', 'sklearn', 'transformers', 'lightning', 'peft', "
        "'holdfast.bench', 'holdfast.cli', 'holdfast.integrations') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
    allowed = {"torch", "safetensors", *sys.stdlib_module_names}
    for path in (path for room in CORE for path in (ROOT / f"{room}.py", *(ROOT / room).glob("*.py")) if path.exists()):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            extra = {"triton"} if path.name.startswith("triton_") else set()  # comes with torch where there is a GPU
            assert {name.split(".")[0] for name in names} <= allowed | extra, path


def test_the_front_door_shows_what_it_names_and_everything_has_a_docstring():
    for name in holdfast.__all__:
        value = getattr(holdfast, name)
        assert value.__doc__ or not callable(value), name
    assert list(holdfast.__all__) == sorted(holdfast.__all__, key=_place)


def _place(name: str) -> tuple[int, str]:
    """Constants and acronyms, classes, functions."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name
