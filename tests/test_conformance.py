"""The gateway as a black box: the cases of `tests/conformance`, less those that are listed as pending.

The runner is a process of its own, as it is by hand (`make conformance`): what is tested is `run.py`, not the test's
event loop.
"""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

REPOSITORY = Path(__file__).parents[1]
CONFORMANCE = REPOSITORY / "tests" / "conformance"
PENDING = CONFORMANCE / "pending.txt"


@pytest.mark.slow
def test_every_case_passes_but_the_pending_ones() -> None:
    """Started as an operator starts it, the gateway does what every case says."""
    command = [sys.executable, str(CONFORMANCE / "run.py")]
    command += ["--start", f"{shlex.quote(sys.executable)} run.py --config {{config}}"]
    if PENDING.exists():
        command += ["--pending", str(PENDING)]

    played = subprocess.run(
        command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )

    assert 0 == played.returncode, played.stdout


def test_the_pending_list_names_cases() -> None:
    """A line of the pending list is the name of a case, so none outlives its case unseen."""
    loader = YAML(typ="safe")
    known = {
        f"{path.stem}: {case['name']}"
        for path in CONFORMANCE.glob("cases/*.yaml")
        for case in loader.load_all(path)
        if case
    }
    pending = PENDING.read_text().splitlines() if PENDING.exists() else []

    assert known, "no case was found"
    assert [] == [line for line in pending if line not in known]
