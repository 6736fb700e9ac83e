"""Private names of torch, DeepSpeed and Megatron-Core that this code base uses.

`uses_in` finds them in the sources, `documented` reads the table of docs/architecture.md, and
`fault_of` looks a row up in the installed library.

A use is

- an import of a private module, or of a private name, from one of the libraries;
- an attribute `x._name`, or a string `"_name"` passed to `getattr`, `setattr` or `hasattr`, that no
  class, function or assignment of our own sources defines; in a class derived from one of the
  libraries, `self._name` that the file itself does not define;
- an attribute that begins with `ds_`: DeepSpeed's notes on parameters and modules;
- an assignment to an attribute of an imported module or class of the libraries.

What a class derived from one of the libraries overrides is found by `overrides_in`.
"""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

LIBRARIES = {
    "torch": "torch",
    "deepspeed": "deepspeed",
    "megatron": "megatron-core",
    "transformer_engine": "transformer_engine",
    "argparse": "Python",
}
# transformer_engine's wrappers in Megatron-Core are imported only where it is installed.
_IMPORTED = ("deepspeed", "megatron", "torch", "argparse")
# Documented, although private by the rule.
_DOCUMENTED = {"_exit", "allow_tf32"}
_READERS = {"getattr", "setattr", "hasattr"}


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        name: with the names of its parameters if it is called or overridden, `f(self, x)`.
        owner: module or class that has it, or whose code sets it on instances.
        places: files of ours that use it.
        why: the reason.
    """

    name: str
    owner: str
    places: tuple[str, ...]
    why: str

    @property
    def bare(self) -> str:
        """The name without parameters."""
        return self.name.partition("(")[0]

    @property
    def parameters(self) -> list[str] | None:
        """Names of the parameters, or None if the table gives none."""
        if "(" not in self.name:
            return None
        inside = self.name.partition("(")[2].removesuffix(")")
        return [part.strip() for part in inside.split(",") if part.strip()]


def documented(page: Path, heading: str) -> list[Row]:
    """Return the rows of the table under a heading."""
    text = page.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 4 and cells[0].startswith("`"):
            name, owner, places, why = cells
            found = tuple(re.findall(r"`([^`]+)`", places))
            rows.append(Row(name.strip("`"), owner.strip("`"), found, why))
    return rows


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != ""


def _root(node: ast.AST) -> str | None:
    """Return the name at the left end of `a.b[c].d`."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def _defined(tree: ast.AST) -> set[str]:
    """Return all names that a file defines: classes, functions, variables, attributes of self."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                names.add(node.attr)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
    return names


def _libraries(tree: ast.AST) -> set[str]:
    """Return the names that a file imports from the libraries."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES:
            names |= {each.asname or each.name for each in node.names}
        elif isinstance(node, ast.Import):
            for each in node.names:
                root = each.name.split(".")[0]
                if root in LIBRARIES:
                    names.add(each.asname or root)
    return names


def uses_in(sources: dict[str, str]) -> set[tuple[str, str]]:
    """Return pairs of a file and a foreign private name that it uses, by the rule above."""
    trees = {path: ast.parse(text) for path, text in sources.items()}
    defined = {path: _defined(tree) for path, tree in trees.items()}
    ours = set().union(*defined.values())
    return {
        (path, name) for path, tree in trees.items() for name in _uses(tree, defined[path], ours)
    }


def _uses(tree: ast.AST, here: set[str], ours: set[str]) -> Iterator[str]:
    foreign = _libraries(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES:
            yield from filter(_is_private, (node.module or "").split("."))
            yield from (each.name for each in node.names if _is_private(each.name))
        elif isinstance(node, ast.Attribute):
            yield from _of_attribute(node, here, ours, foreign)
        elif isinstance(node, ast.Call):
            yield from _of_call(node, ours, foreign)


def _of_attribute(node: ast.Attribute, here: set[str], ours: set[str], foreign: set[str]) -> Any:
    name, root = node.attr, _root(node)
    if name in _DOCUMENTED:
        return
    if name.startswith("ds_"):
        yield name
    elif _is_private(name):
        if root in foreign or name not in (here if root in ("self", "cls") else ours):
            yield name
    elif isinstance(node.ctx, ast.Store) and root in foreign:
        # `f.__defaults__ = ...` changes f.
        is_of_function = name == "__defaults__" and isinstance(node.value, ast.Attribute)
        inner = node.value if is_of_function else node
        assert isinstance(inner, ast.Attribute)
        yield inner.value.attr if inner.attr == "__func__" else inner.attr  # type: ignore[attr-defined]


def _of_call(node: ast.Call, ours: set[str], foreign: set[str]) -> Iterator[str]:
    function = node.func.id if isinstance(node.func, ast.Name) else ""
    if function not in _READERS or len(node.args) < 2:
        return
    name, is_foreign = node.args[1], _root(node.args[0]) in foreign
    if isinstance(name, ast.Constant) and isinstance(name.value, str):
        is_private = _is_private(name.value) and (is_foreign or name.value not in ours)
        if is_private or name.value.startswith("ds_") or (is_foreign and function == "setattr"):
            yield name.value


def overrides_in(sources: dict[str, str]) -> set[tuple[str, str]]:
    """Return pairs of a file and a name that its classes override in a class of the libraries.

    Of torch and argparse only private names; of the others all but `forward`, which every module
    has. Bases are those imported by the file, and theirs through classes of the same file.
    """
    found = set()
    for path, text in sources.items():
        tree = ast.parse(text)
        imported = {
            each.asname or each.name: f"{node.module}.{each.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in _IMPORTED
            for each in node.names
        }
        bases: dict[str, list[type]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [
                    base
                    for each in node.bases
                    for base in _bases(ast.unparse(each), imported, bases)
                ]
                found |= {(path, name) for name in _overridden(node, bases[node.name])}
    return found


def _bases(name: str, imported: dict[str, str], known: dict[str, list[type]]) -> list[type]:
    root, _, rest = name.partition(".")
    if root not in imported:
        return known.get(name, [])
    made = pkgutil.resolve_name(".".join(filter(None, (imported[root], rest))))
    return [made] if inspect.isclass(made) else []


def _overridden(node: ast.ClassDef, bases: list[type]) -> Iterator[str]:
    for name in _members(node):
        for base in (each for made in bases for each in made.__mro__ if name in vars(each)):
            library = base.__module__.split(".")[0]
            if library in LIBRARIES and (library in _IMPORTED[:2] or _is_private(name)):
                yield name


def _members(node: ast.ClassDef) -> Iterator[str]:
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and each.name != "forward":
            if not each.name.startswith("__"):
                yield each.name
        elif isinstance(each, ast.Assign):
            yield from (target.id for target in each.targets if isinstance(target, ast.Name))


def fault_of(row: Row) -> str | None:
    """Return what is wrong with a row in the installed version, as a sentence; None if nothing."""
    library = LIBRARIES[row.owner.split(".")[0]]
    installed = library if library == "Python" else f"{library} {metadata.version(library)}"
    use = f"which {' and '.join(row.places)} use{'s' * (len(row.places) == 1)}: {row.why}"
    try:
        owner: Any = pkgutil.resolve_name(row.owner)
    except (ImportError, AttributeError):
        return f"{installed} has no {row.owner}, {use}"
    try:
        found = inspect.getattr_static(owner, row.bare)
    except AttributeError:
        if row.bare in _set_by(owner):
            return None
        return f"{installed}: {row.owner} has no {row.bare}, {use}"
    if row.parameters is None:
        return None
    function = found.__func__ if isinstance(found, classmethod | staticmethod) else found
    now = list(inspect.signature(function).parameters)
    if now == ["args", "kwargs"]:
        # Behind a decorator that does not say what it wraps.
        now = _written_parameters(owner, row.bare)
    if now != row.parameters:
        return (
            f"{installed}: {row.owner}.{row.bare} takes ({', '.join(now)}), not {row.name}, {use}"
        )
    return None


def _tree(owner: Any) -> ast.AST:
    return ast.parse(inspect.cleandoc("\n" + inspect.getsource(owner)))


def _written_parameters(owner: Any, name: str) -> list[str]:
    """Return the parameters of a function as its source names them."""
    for node in ast.walk(_tree(owner)):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
    return []


def _set_by(owner: Any) -> set[str]:
    """Return the attributes that the code of a module or class sets on any object."""
    if inspect.isclass(owner):
        made = [each for each in owner.__mro__ if each is not object]
        return set().union(*(_stored(_tree(each)) for each in made if _has_source(each)))
    return _stored(_tree(owner))


def _has_source(made: type) -> bool:
    return made.__module__.split(".")[0] in LIBRARIES and not made.__module__.endswith("_C")


def _stored(tree: ast.AST) -> set[str]:
    stored = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    stored |= {
        node.slice.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)
        if isinstance(node.ctx, ast.Store) and isinstance(node.slice.value, str)
    }
    inner = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return stored | inner
