"""Checks what a wheel and a source archive hold: `python .ci/check_dist.py FOLDER`.

Both packages whole, type markers, the licence, data files, the version of
jrope/_version.py, and nothing of the tests in the wheel.
"""

import email
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("jrope", "pallas_kernels")
# In the source archive alone: what its tests and documentation need.
SOURCES = ("tests", "benchmarks", "docs", "notebooks")
FILES = ("LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml")


def main(folder: Path) -> int:
    """Prints what is wrong; the exit status."""
    (wheel,), (archive,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    wrong = [*check_wheel(wheel), *check_archive(archive)]
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    if not wrong:
        print(f"{wheel.name} and {archive.name} hold what they should")
    return 1 if wrong else 0


def tracked(*folders: str) -> set[str]:
    """Files of the repository below some folders."""
    listed = subprocess.run(
        ["git", "ls-files", "--", *folders],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return set(listed.stdout.split())


def version() -> str:
    """The one that jrope/_version.py says."""
    text = (ROOT / "jrope" / "_version.py").read_text()
    (found,) = re.findall(r'^__version__ = "(.+)"$', text, flags=re.MULTILINE)
    return found


def check_wheel(path: Path) -> list[str]:
    """What is wrong with a wheel."""
    with zipfile.ZipFile(path) as wheel:
        held = set(wheel.namelist())
        (about,) = (name for name in held if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(wheel.read(about))
    info = about.rpartition("/")[0]
    code = {name for name in held if not name.startswith(f"{info}/")}
    wanted = tracked(*PACKAGES)
    wrong = [f"{path.name} lacks {name}" for name in sorted(wanted - code)]
    wrong += [f"{path.name} has {name} besides" for name in sorted(code - wanted)]
    if f"{info}/licenses/LICENSE" not in held:
        wrong.append(f"{path.name} lacks the licence")
    wrong += [
        f"{path.name} lacks {package}/py.typed"
        for package in PACKAGES
        if f"{package}/py.typed" not in code
    ]
    for key, value in {
        "Version": version(),
        "License-Expression": "Apache-2.0",
    }.items():
        if metadata[key] != value:
            wrong.append(f"{path.name} says {key} {metadata[key]}, not {value}")
    return wrong


def check_archive(path: Path) -> list[str]:
    """What is wrong with a source archive."""
    with tarfile.open(path) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    wanted = tracked(*PACKAGES, *SOURCES) | set(FILES)
    return [f"{path.name} lacks {name}" for name in sorted(wanted - held)]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
