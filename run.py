#!/usr/bin/env python3
"""EZAT Router: an LLM gateway. ``run.py --config FILE`` serves; see ``run.py --help``."""

from __future__ import annotations

import signal
import sys

# What is told to stop or to reload while it is still being read shall obey as soon as it can.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})

from plugins import BUNDLED  # noqa: E402
from proxy.command import main  # noqa: E402

if __name__ == "__main__":
    main(BUNDLED, sys.argv[1:])
