"""What tmd refuses in the user's script: told by the line of the script and the refusal's text, without tmd's own frames."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

from tmd_worker.optimizers import OptimizerRefused
from tmd_worker.state.errors import TrackRefused
from tmd_worker.step import StepMisused

_NOT_THE_USERS = (f"{Path(__file__).parent}/", f"{Path(torch.__file__).parent}/", "<frozen ")


def told(error: Exception) -> str | None:
    """None for any other error: its traceback is what helps."""
    if not isinstance(error, TrackRefused | OptimizerRefused | StepMisused):
        return None
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_NOT_THE_USERS)]
    where = f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}\n" if frames else ""
    return f"{where}{type(error).__name__}: {error}\n"
