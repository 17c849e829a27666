#!/usr/bin/env python3
"""EZAT Router: an LLM gateway. ``run.py --config FILE`` serves; see ``run.py --help``."""

from __future__ import annotations

import sys

from plugins import BUNDLED
from proxy.command import main

if __name__ == "__main__":
    main(BUNDLED, sys.argv[1:])
