"""What the packages never do, and what they stand on.

No code is built from text, no pickle is read, no shell is run; every dependency has a
purpose and a licence on a page of the documentation.
"""

import ast
import re
import tomllib
from pathlib import Path

import pytest

import jrope

ROOT = Path(__file__).parents[1]
# Of a clone it is the root; of a wheel, site-packages.
PACKAGES = Path(jrope.__file__).parents[1]
SOURCES = [
    *sorted((PACKAGES / "jrope").rglob("*.py")),
    *sorted((PACKAGES / "pallas_kernels").rglob("*.py")),
]
MODULES = {
    "_pickle",
    "cloudpickle",
    "code",
    "codeop",
    "commands",
    "dill",
    "ftplib",
    "http",
    "joblib",
    "marshal",
    "pickle",
    "pty",
    "requests",
    "shelve",
    "socket",
    "subprocess",
    "telnetlib",
    "torch",
    "urllib",
    "yaml",
}
CALLS = {"eval", "exec", "compile", "__import__", "breakpoint", "input"}
OF_MODULES = {
    "os": {"system", "popen", "fork", "remove", "unlink", "rmdir", "kill", "putenv"},
    "shutil": {"rmtree", "move"},
}
PREFIXES = {"os": ("exec", "spawn", "posix_spawn")}


def forbidden(tree):
    """What a module does that none may: (line, what)."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                top = name.name.split(".")[0]
                aliases[(name.asname or name.name).split(".")[0]] = top
                if top in MODULES:
                    yield node.lineno, name.name
        elif isinstance(node, ast.ImportFrom) and not node.level:
            top = (node.module or "").split(".")[0]
            if top in MODULES:
                yield node.lineno, node.module
            for name in node.names:
                if is_bad(top, name.name):
                    yield node.lineno, f"{top}.{name.name}"
        elif isinstance(node, ast.Name) and is_read(node) and node.id in CALLS:
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            holder = node.value.id if isinstance(node.value, ast.Name) else ""
            if is_bad(aliases.get(holder, holder), node.attr):
                yield node.lineno, f"{holder}.{node.attr}"
        elif isinstance(node, ast.keyword):
            value = getattr(node.value, "value", None)
            if node.arg in ("allow_pickle", "shell") and value is not False:
                yield node.lineno, f"{node.arg}={value}"


def is_read(node):
    """Whether a name is looked up: a field may be called `compile`."""
    return isinstance(node.ctx, ast.Load)


def is_bad(module, name):
    return name in OF_MODULES.get(module, ()) or name.startswith(
        PREFIXES.get(module, ("no such prefix",))
    )


@pytest.mark.parametrize("file", SOURCES, ids=lambda f: str(f.relative_to(PACKAGES)))
def test_no_code_from_text_no_pickle_no_shell(file):
    assert not list(forbidden(ast.parse(file.read_text())))


def tells_the_type_checker(test):
    """`x is not None`, also joined by `and`, of what cannot be None."""
    parts = test.values if isinstance(test, ast.BoolOp) else [test]
    return all(
        isinstance(part, ast.Compare)
        and isinstance(part.ops[0], ast.IsNot)
        and getattr(part.comparators[0], "value", 0) is None
        for part in parts
    )


# Python's -O leaves assertions out: nothing may depend on one.
@pytest.mark.parametrize("file", SOURCES, ids=lambda f: str(f.relative_to(PACKAGES)))
def test_checks_are_no_assertions(file):
    tree = ast.parse(file.read_text())
    assertions = [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    assert all(tells_the_type_checker(node.test) for node in assertions)


@pytest.mark.parametrize(
    "code",
    [
        "eval('1')",
        "run = exec",
        "__import__('os')",
        "import pickle",
        "from pickle import loads",
        "import subprocess as s",
        "import os\nos.system('ls')",
        "import os as o\no.popen('ls')",
        "from os import execv",
        "import os\nos.spawnl(0, 'x')",
        "np.load(f, allow_pickle=True)",
        "run('ls', shell=flag)",
    ],
)
def test_it_would_be_seen(code):
    assert list(forbidden(ast.parse(code)))


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGE = (ROOT / "docs" / "pages" / "dependencies.md").read_text()
ROW = re.compile(r"^\| `([\w.-]+)` \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def names(requirements):
    """The packages of a list of requirements, jrope's own extras left out."""
    found = {re.split(r"[\[<>=~! ;]", line)[0] for line in requirements}
    return found - {"jrope"}


def sections():
    """The page's tables by their headings."""
    parts = re.split(r"^## (.+)$", PAGE, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_every_dependency_has_a_purpose_and_a_licence():
    wanted = {"jrope": names(PROJECT["dependencies"])}
    wanted |= {
        extra: names(lines) for extra, lines in PROJECT["optional-dependencies"].items()
    }
    for extra, packages in wanted.items():
        rows = ROW.findall(sections()[extra])
        assert {name for name, *_ in rows} == packages, extra
        for name, purpose, licence in rows:
            assert len(purpose.split()) >= 2, name
            assert re.match(r"(Apache|MIT|BSD|PSF|MPL|LGPL|HPND|ISC)", licence), name
