"""Private names of libraries: the table is complete, and the installed versions have them."""

from pathlib import Path

import pytest
from foreign_names import Row, documented, fault_of, overrides_in, uses_in

ROOT = Path(__file__).parents[2]
ROWS = documented(ROOT / "docs/architecture.md", "Private names of libraries")
# Of an optional library besides these, and of our own blocks.
OTHERS = {("megavis/evaluation/images/feature_networks.py", "_fc")}


def sources():
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for folder in ("megavis", "benchmarks")
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def test_table_names_every_use():
    found = sources()
    # Wrappers of an optional library, which override `forward` alone.
    plain = {path: text for path, text in found.items() if "transformer_engine" not in path}
    uses = (uses_in(found) | overrides_in(plain)) - OTHERS
    rows = {(f"megavis/{place}", row.bare) for row in ROWS for place in row.places}
    missing = sorted(f"{path}: {name}" for path, name in uses - rows)
    assert not missing, f"docs/architecture.md, 'Private names of libraries', lacks {missing}"
    unused = sorted(
        f"{path}: {name}" for path, name in rows - uses if name not in found.get(path, "")
    )
    assert not unused, f"docs/architecture.md lists names that nothing uses: {unused}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.owner}.{row.bare}")
def test_installed_library_has_the_name(row):
    fault = fault_of(row)
    assert fault is None, fault


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import torch\ntorch.nn._reduction", {"_reduction"}),
        ("from torch._C import x", {"_C"}),
        ("from torch.nn import _reduction as r", {"_reduction"}),
        ("def f(engine): return engine._config", {"_config"}),
        ("def f(engine): return getattr(engine, '_config')", {"_config"}),
        ("class A:\n  def __init__(self): self._own = 1\ndef f(a): return a._own", set()),
        ("class A:\n  def f(self): return self._theirs", {"_theirs"}),
        ("def f(p): p.ds_id", {"ds_id"}),
        ("from deepspeed.utils import groups\ngroups.mpu = None", {"mpu"}),
        ("from deepspeed import X\nX.f.__defaults__ = ()", {"f"}),
        ("import os\nos._exit(0)", set()),
        ("def f(x): return x.__dict__, x._", set()),
    ],
)
def test_rule_finds_private_names(text, names):
    assert uses_in({"a.py": text}) == {("a.py", name) for name in names}


def test_rule_finds_overrides():
    text = """
from torch.nn import Module
from deepspeed.pipe import PipelineModule
class A(Module):
    def _apply(self, fn): ...
    def train(self): ...
    def own(self): ...
class B(A):
    def _call_impl(self): ...
class C(PipelineModule):
    def forward(self, x): ...
    def mpu(self): ...
"""
    assert overrides_in({"a.py": text}) == {(("a.py"), n) for n in ("_apply", "_call_impl", "mpu")}


@pytest.mark.parametrize(
    ("name", "owner", "words"),
    [
        ("_gone", "torch.nn.Module", "torch.nn.Module has no _gone"),
        ("_apply(self, fn)", "torch.nn.Module", "takes (self, fn, recurse), not _apply(self, fn)"),
        ("x", "torch.no_such_module", "has no torch.no_such_module"),
    ],
)
def test_fault_is_a_sentence(name, owner, words):
    fault = fault_of(Row(name, owner, ("model/norms.py",), "statistics stay float32"))
    assert fault.startswith("torch 2.")
    assert words in fault
    assert fault.endswith("which model/norms.py uses: statistics stay float32")
