"""What holds for every test.

Hypothesis judges by results alone: a deadline for each example would make a busy machine look like a broken promise.
"""

from hypothesis import settings

settings.register_profile("gateway", deadline=None)
settings.load_profile("gateway")
