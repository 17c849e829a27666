"""The unit of systemd: how it stops and reloads the gateway, and what it keeps it from."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.operator_files import LONGEST_STOP, PAGE
from tests.process import REPOSITORY

UNIT = REPOSITORY / "deploy" / "ezat-router.service"


def settings_of(unit: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in re.findall(r"^(\w+)=(.*)$", unit, re.MULTILINE):
        found.setdefault(name, []).append(value)
    return found


def test_the_unit_stops_and_reloads_as_the_gateway_does() -> None:
    """The gateway alone is told to stop, has the time for it, and reloads only what was found good."""
    unit = settings_of(UNIT.read_text())
    start, (check, hangup) = unit["ExecStart"][0], unit["ExecReload"]

    assert (["SIGTERM"], ["mixed"], ["exec"]) == (unit["KillSignal"], unit["KillMode"], unit["Type"])
    assert float(unit["TimeoutStopSec"][0]) > LONGEST_STOP
    assert start.replace("run.py ", "run.py check ") == check
    assert "/bin/kill -HUP $MAINPID" == hangup
    assert ["on-failure"] == unit["Restart"]


def test_the_unit_may_write_to_one_folder() -> None:
    """What the gateway can't do, nobody who breaks into it can: write elsewhere, or gain rights."""
    unit = settings_of(UNIT.read_text())

    assert [f"/var/lib/{unit['StateDirectory'][0]}"] == unit["WorkingDirectory"]
    assert unit["User"] != ["root"]
    assert {("strict",), ("yes",)} == {tuple(unit["ProtectSystem"]), tuple(unit["NoNewPrivileges"])}
    assert "ReadWritePaths" not in unit
    assert [""] == unit["CapabilityBoundingSet"]


@pytest.fixture
def unit_here(tmp_path: Path) -> Path:
    """The unit as it would be for this checkout, so that what it names is there."""
    text = UNIT.read_text().replace("/opt/ezat-router/.venv/bin/python", sys.executable)
    path = tmp_path / UNIT.name
    path.write_text(text.replace("/opt/ezat-router", str(REPOSITORY)))
    return path


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize(
    "arguments",
    [pytest.param(["verify"], id="valid"), pytest.param(["security", "--offline=true", "--threshold=20"], id="safe")],
)
def test_systemd_takes_the_unit(arguments: list[str], unit_here: Path) -> None:
    """systemd knows every setting of the unit, and counts it among the safe ones (2 of 10 at the most)."""
    ended = subprocess.run(["systemd-analyze", *arguments, str(unit_here)], capture_output=True, text=True, timeout=60)

    assert 0 == ended.returncode, ended.stdout + ended.stderr
    assert [] == [line for line in ended.stderr.splitlines() if UNIT.name in line]


def test_the_paths_of_the_unit_are_those_of_the_page() -> None:
    """The page puts every file where the unit looks for it."""
    text = (REPOSITORY / PAGE).read_text()
    paths = set(re.findall(r"/(?:opt|etc|var/lib)/ezat-router[\w./-]*", UNIT.read_text()))

    assert paths
    assert [] == [path for path in sorted(paths) if path not in text]
