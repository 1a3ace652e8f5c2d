"""A mistake that tmd refuses is told by the line of the script, without tmd's own frames."""

from __future__ import annotations

import pytest

from tmd_worker import mistakes
from tmd_worker.optimizers import OptimizerRefused
from tmd_worker.state.errors import TrackRefused
from tmd_worker.step import StepMisused


def raised(error: Exception) -> Exception:
    """The error as it comes out of line 3 of a script."""
    script = compile("\n\nfail()", "train.py", "exec")

    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        exec(script, {"fail": fail})
    return caught.value


@pytest.mark.parametrize("kind", [TrackRefused, OptimizerRefused, StepMisused])
def test_what_tmd_refuses_is_told_without_a_traceback(kind: type[Exception]) -> None:
    told = mistakes.told(raised(kind("write it otherwise")))
    assert told is not None
    assert f"{kind.__name__}: write it otherwise\n" in told
    assert "Traceback" not in told


def test_any_other_error_keeps_its_traceback() -> None:
    assert mistakes.told(raised(ValueError("my own"))) is None
