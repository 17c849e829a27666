"""The habits of the project that no other tool watches: what a file may hold, what is depended on, how long a file is.

They judge the files of the checkout as git knows them; an unpacked archive is walked instead.
"""

import ast
import configparser
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[1]
LOCKS = ("requirements.lock", "requirements-dev.lock")
FURTHER_LOCKS = ("requirements-llm.lock", "requirements-clients.lock")

# Written so that this file does not hold what it looks for.
FOREIGN_WORDS = {
    "a path of one machine": rb"/(?:wor[k]|far[m]|roo[t]|tm[p]|User[s])/|/hom[e]/\w+/",
    "a registry's host": rb"(?:pyp[i]|npmj[s]|deb\.debia[n]|pythonhoste[d])\.(?:org|com|net)",
    "how it was made": rb"before-sto[p]|\bCE[O]\b|Co-Authored-B[y]|Generated wit[h]",
}

UNTRACKED_FOLDERS = r"^\.|^__pycache__$|^data$|^node_modules$|\.egg-info$"

# A dependency that works behind another library: the name that shows its use.
USED_THROUGH = {"aiodns": "AsyncResolver", "psycopg": "postgresql+psycopg"}

MOST_LINES = 300
LONGER_FOR_A_REASON: dict[str, str] = {}


def repository_files() -> list[Path]:
    listed = None
    if (REPOSITORY / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        try:
            listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True).stdout.decode()
        except (OSError, subprocess.CalledProcessError):
            listed = None  # no git here, or not our checkout for it
    paths = [REPOSITORY / name for name in listed.split("\0") if name] if listed else list(walked_files())
    return sorted(path for path in paths if path.is_file())


def walked_files() -> Iterator[Path]:
    for folder, below, names in os.walk(REPOSITORY):
        below[:] = [name for name in below if name == ".ci" or not re.search(UNTRACKED_FOLDERS, name)]
        yield from (Path(folder, name) for name in names)


def source_files() -> list[Path]:
    """The gateway's own code: engine, plugins and entry point."""
    return sorted([*REPOSITORY.glob("proxy/**/*.py"), *REPOSITORY.glob("plugins/**/*.py"), REPOSITORY / "run.py"])


def imported_modules(path: Path) -> set[str]:
    """The full dotted names that a file imports, `from a.b import c` as `a.b`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), path.name)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return found


def requirements(section: str, option: str) -> list[Requirement]:
    settings = configparser.ConfigParser(interpolation=None)
    settings.read(REPOSITORY / "setup.cfg")
    return [Requirement(line) for line in settings[section][option].splitlines() if line and not line.startswith("#")]


def runtime_requirements() -> list[Requirement]:
    return requirements("options", "install_requires")


def development_requirements() -> list[Requirement]:
    return requirements("options.extras_require", "dev")


def pinned_versions(lock: str) -> dict[str, str]:
    pins = re.findall(r"^([\w.-]+)==(\S+)", (REPOSITORY / lock).read_text(), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in pins}


@pytest.mark.parametrize("what", FOREIGN_WORDS)
def test_no_file_names_what_is_not_the_projects(what: str) -> None:
    """Nothing in the repository works, or makes sense, on one machine only."""
    pattern = re.compile(FOREIGN_WORDS[what])
    files = repository_files()

    found = [
        f"{path.relative_to(REPOSITORY)}:{number}"
        for path in files
        for number, line in enumerate(path.read_bytes().splitlines(), 1)
        if pattern.search(line)
    ]

    assert Path(__file__) in files
    assert [] == found


@pytest.mark.parametrize("lock", LOCKS + FURTHER_LOCKS)
def test_a_lock_pins_by_hash_and_names_no_address(lock: str) -> None:
    """What a lock installs is told by its hashes, wherever it comes from."""
    text = (REPOSITORY / lock).read_text()
    uncommented = re.sub(r"^ *#.*\n|^\n", "", text, flags=re.MULTILINE)
    entries = re.sub(r" *\\\n *", " ", uncommented).splitlines()

    unpinned = [entry for entry in entries if not re.fullmatch(r"[\w.-]+==\S+( --hash=sha256:[0-9a-f]{64})+", entry)]

    assert entries
    assert [] == unpinned
    assert "://" not in text


@pytest.mark.parametrize(
    ("lock", "asked"),
    [
        pytest.param("requirements.lock", runtime_requirements(), id="the gateway"),
        pytest.param("requirements-dev.lock", runtime_requirements() + development_requirements(), id="development"),
    ],
)
def test_a_lock_answers_setup_cfg(lock: str, asked: list[Requirement]) -> None:
    """A lock pins every dependency within its bounds, so none is forgotten when setup.cfg changes."""
    pins = pinned_versions(lock)

    unmet = [str(one) for one in asked if not one.specifier.contains(pins.get(canonicalize_name(one.name), "0.dev0"))]

    assert [] == unmet


def test_development_runs_on_the_versions_of_the_gateway() -> None:
    """What the tests run on is what `make run` installs."""
    gateway, development = (pinned_versions(lock) for lock in LOCKS)

    assert gateway == {name: version for name, version in development.items() if name in gateway}


@pytest.mark.parametrize("one", runtime_requirements() + development_requirements(), ids=lambda one: one.name)
def test_a_dependency_is_bounded(one: Requirement) -> None:
    """A next major version is taken by hand, never by accident."""
    assert ["<", ">="] == sorted(bound.operator for bound in one.specifier)


@pytest.mark.parametrize("one", runtime_requirements(), ids=lambda one: one.name)
def test_a_dependency_is_used(one: Requirement) -> None:
    """Nobody installs a library that the gateway does not use."""
    module = one.name.replace("-", "_")
    if one.name in USED_THROUGH:
        users = [path for path in source_files() if USED_THROUGH[one.name] in path.read_text()]
    else:
        users = [
            path
            for path in source_files()
            if any(f"{name}.".startswith(f"{module}.") for name in imported_modules(path))
        ]

    assert users, f"nothing imports {module}"


@pytest.mark.parametrize("one", runtime_requirements(), ids=lambda one: one.name)
def test_a_dependency_has_its_reason_in_the_docs(one: Requirement) -> None:
    """The table under "Dependencies" in docs/architecture.md says what each library is there for."""
    text = (REPOSITORY / "docs" / "architecture.md").read_text()
    section = re.search(r"^(#+) Dependencies\s*$(.*?)(?=^#{1,6} |\Z)", text, re.MULTILINE | re.DOTALL)

    assert section, 'docs/architecture.md has no section "Dependencies"'
    assert one.name in re.findall(r"^\| *`([^`]+)` *\|", section[2], re.MULTILINE)


def test_the_engine_imports_no_plugin() -> None:
    """The engine knows no plugin by name: each may be left out, replaced or added."""
    engine = [path for path in source_files() if path.is_relative_to(REPOSITORY / "proxy")]

    found = [
        f"{path.relative_to(REPOSITORY)} imports {name}"
        for path in engine
        for name in sorted(imported_modules(path))
        if name.split(".")[0] == "plugins"
    ]

    assert engine
    assert [] == found


def test_no_source_file_is_long_without_a_reason() -> None:
    """A file that has grown past what one reads at a sitting is parted, or says here why not."""
    lengths = {str(path.relative_to(REPOSITORY)): len(path.read_text().splitlines()) for path in source_files()}
    too_long = {name for name, length in lengths.items() if length > MOST_LINES}

    assert set(LONGER_FOR_A_REASON) == too_long
