"""How the attempt of a step ends that will not count."""

from __future__ import annotations


class StepDiscarded(BaseException):
    """This attempt of the step is given up: a link broke, and the step runs again with the same data.

    It derives from BaseException so that `except Exception` in a training script does not swallow it.
    """
