"""Who may import whom: arrows point down only, and reading a trace waits for nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PACKAGE = ROOT / "ccviz"
LEVELS = ["errors", "cache", "network", "strategies", "settings", "engine", "runs", "jobs", "ui"]
READERS = [
    "errors",
    "events",
    "tokens",
    "trace",
    "metrics",
    "prompts",
    "figures",
    "export",
    "library",
    "lessons",
    "handout",
]
FILES = sorted(PACKAGE.rglob("*.py"))
PAGES = [ROOT / "app.py", *sorted((ROOT / "pages").glob("*.py"))]
ENGINE = [path for path in FILES if path.relative_to(PACKAGE).parts[0] != "ui"]


def imported(path: Path) -> set[str]:
    """Every module a file imports, anywhere in it, ``from ccviz import figures`` as ``ccviz.figures`` too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import, which this test does not follow"
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def roots(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(path)}


def module_of(path: Path) -> str:
    """``ccviz/ui/page.py`` is ``ui``, ``ccviz/jobs.py`` is ``jobs``."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_files_are_found() -> None:
    assert {module_of(path) for path in FILES} > set(LEVELS)
    assert len(PAGES) > 1
    assert "streamlit" in roots(ROOT / "app.py")
    assert "ccviz.errors" in imported(PACKAGE / "cli.py")
    assert "ccviz.prompts" in imported(PACKAGE / "cli.py")  # inside a function


@pytest.mark.parametrize("path", ENGINE, ids=named)
def test_nothing_below_the_pages_knows_streamlit_or_the_pages(path: Path) -> None:
    assert "streamlit" not in roots(path)
    assert not [name for name in imported(path) if name == "ccviz.ui" or name.startswith("ccviz.ui.")]
    assert not roots(path) & {"app", "pages"}


@pytest.mark.parametrize("path", ENGINE, ids=named)
def test_only_figures_and_exports_know_plotly(path: Path) -> None:
    assert ("plotly" in roots(path)) <= (module_of(path) in ("figures", "export"))


@pytest.mark.parametrize("path", [path for path in FILES if module_of(path) in LEVELS], ids=named)
def test_no_module_imports_from_one_above_it(path: Path) -> None:
    own = LEVELS.index(module_of(path))
    parts = [name.split(".") for name in imported(path) if name.startswith("ccviz.")]
    above = [part[1] for part in parts if part[1] in LEVELS and LEVELS.index(part[1]) > own]
    assert not above


@pytest.mark.parametrize("name", LEVELS[:-1])
def test_the_engine_knows_nothing_of_pictures_or_the_command_line(name: str) -> None:
    paths = [path for path in FILES if module_of(path) == name]
    assert paths
    drawn = {"ccviz.figures", "ccviz.drawing", "ccviz.export", "ccviz.cli", "ccviz.metrics"}
    assert not [found for path in paths for found in imported(path) & drawn]


@pytest.mark.parametrize("name", READERS)
def test_what_reads_a_trace_does_not_import_torch(name: str) -> None:
    assert not roots(PACKAGE / f"{name}.py") & {"torch", "transformers", "accelerate"}


@pytest.mark.parametrize("name", READERS[1:])
def test_reading_a_trace_does_not_wait_for_torch(name: str) -> None:
    code = f"import sys, ccviz.{name}; print(sorted({{'torch', 'transformers', 'streamlit'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr


def test_the_pins_are_the_dependencies_and_satisfy_them() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {canonicalize_name(one.name): one for one in map(Requirement, project["dependencies"])}
    lines = [line.partition("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    pins = {}
    for line in lines:
        if line and not line.startswith("-"):
            name, equals, version = line.partition(";")[0].strip().partition("==")
            assert equals, f"{line} is no pin"
            pins[canonicalize_name(name.partition("[")[0])] = version.strip()
    assert set(pins) == set(wanted)
    for name, version in pins.items():
        assert wanted[name].specifier.contains(version), f"{name}=={version} is outside {wanted[name].specifier}"
