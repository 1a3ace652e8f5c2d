"""State of the script that `session.track` was not told of, as the shadow steps show it.

Contract: `begin` before the first shadow step, `steps_done` after the last one, then everything tracked is put back, then
`findings`. What changed and is not back is lost with the rank: an error. What is there and did not change is a warning. A script
may hold anything: if looking at it fails, that is a finding and no exception.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

from tmd_worker.check import kinds
from tmd_worker.check.draws import Draws
from tmd_worker.check.findings import Finding, Severity
from tmd_worker.check.gradients import CarriedGradients
from tmd_worker.check.holdings import Held, Walk, roots
from tmd_worker.state.loader import LoaderCursor
from tmd_worker.state.tracked import Tracked
from tmd_worker.warmup import Watch

_CHANGED = "{a_type} that was not tracked changed in the shadow steps"
_MADE = "{a_type} that was not tracked was made in a shadow step and stays"
_DRAWN = "{a_type} that was not tracked is drawn from in one step after another"
#: A script builds these once; other kinds are made for the length of a step, too.
_BUILT = (kinds.MODULE, kinds.OPTIMIZER, kinds.SCHEDULER, kinds.SCALER)
_THERE = "{a_type} that was not tracked; it did not change in the shadow steps"
#: The script was stopped in its first shadow step.
_SEEN = "{a_type} that was not tracked"


class Untracked:
    """One process's look at its script."""

    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked
        self._draws = Draws()
        self._gradients = CarriedGradients(tracked.parameters)
        #: To be entered around the shadow steps.
        self.watches: tuple[Watch, ...] = (self._draws, self._gradients)
        self._frame: FrameType | None = None
        #: By its path, what the script holds after everything tracked was put back; looked for at most once.
        self._again: dict[str, Held] | None = None
        self._held: list[Held] = []
        self._made: list[Held] = []
        #: Fingerprints before the shadow steps and after them, by the held object's id.
        self._before: dict[int, bytes] = {}
        self._after: dict[int, bytes] = {}
        self._failure: Exception | None = None

    def begin(self, frame: FrameType) -> None:
        """`frame`: the caller's; the script's functions are above it."""
        self._frame = frame
        with self._looking():
            self._held = self._walk(frame)
            self._before = {id(held.obj): held.fingerprint() for held in self._held}

    def steps_done(self, frame: FrameType | None = None) -> None:
        """Nothing tracked has been put back yet. Without `frame` the script's functions are gone: an exception left them."""
        with self._looking():
            self._after = {id(held.obj): held.fingerprint() for held in self._held}
            if frame is not None:
                self._made = [held for held in self._walk(frame) if held.kind in _BUILT and id(held.obj) not in self._before]

    def findings(self, *, restored: bool, stepped: bool = True) -> list[Finding]:
        """Errors first. `restored`: everything tracked has been put back since. `stepped`: a shadow step came to its end."""
        found: list[Finding] = []
        unchanged = _THERE if stepped else _SEEN
        with self._looking():
            found = [finding for held in self._held if (finding := self._finding(held, restored, unchanged)) is not None]
            found += [_finding_of(held, _MADE, severity="error") for held in self._made]
            found += [_by_hand(name) for name, cursor in self._tracked.loaders.items() if self._is_drawn_by_hand(cursor)]
        carried = [name for name in self._gradients.carried if self._is_stepped(name)]
        if carried:
            found.append(_carried(carried))
        self._frame = None
        if self._failure is not None:
            what = f"the script could not be searched for state that was not tracked: {self._failure!r}"
            return [Finding(severity="error", kind="check", what=what, why="whatever was forgotten", remedy="report this")]
        return sorted(found, key=lambda finding: finding.severity)

    @contextlib.contextmanager
    def _looking(self) -> Iterator[None]:
        """What goes wrong first is kept for `findings`."""
        try:
            yield
        except Exception as error:
            self._failure = self._failure or error

    def _finding(self, held: Held, restored: bool, unchanged: str) -> Finding | None:
        if held.kind is kinds.LOADER and self._draws.carried(held.obj):
            return _finding_of(held, _DRAWN, severity="error", fatal=True)
        if held.kind is kinds.ITERATOR and self._of_a_loader(held.obj):
            return None
        before, after = self._before[id(held.obj)], self._after.get(id(held.obj), b"")
        now = held.fingerprint() if restored else after
        if now != before and not (restored and self._is_back_as_another(held, before)):
            return _finding_of(held, _CHANGED, severity="error", fatal=held.kind.sure)
        if after != before:
            return None  # it changed and is back: something tracked covers it
        return _finding_of(held, unchanged, severity="warning") if held.matters() else None

    def _is_stepped(self, name: str) -> bool:
        """An optimizer uses the gradient of this parameter; what piles up in one that nobody steps changes nothing."""
        groups = [group for optimizer in self._tracked.optimizers.values() for group in optimizer.param_groups]
        return any(part is self._tracked.parameters[name] for group in groups for part in group["params"])

    def _is_back_as_another(self, held: Held, before: bytes) -> bool:
        """What is tracked may put another object in this one's place: `self.shadow = state["shadow"]`."""
        if self._frame is None:
            return False
        if self._again is None:
            self._again = {each.node.path: each for each in self._walk(self._frame)}
        there = self._again.get(held.node.path)
        return there is not None and there.kind is held.kind and there.fingerprint() == before

    def _is_drawn_by_hand(self, cursor: LoaderCursor) -> bool:
        """An object that knows its own position may be."""
        source = cursor.parts()[0]
        return isinstance(source, DataLoader) and not hasattr(source, "state_dict") and self._draws.carried(source)

    def _of_a_loader(self, iterator: Any) -> bool:
        """One of a loader that is named itself."""
        sampler = getattr(iterator, "_index_sampler", None)
        loaders = [held.obj for held in self._held if held.kind is kinds.LOADER]
        loaders += [source for cursor in self._tracked.loaders.values() if isinstance(source := cursor.parts()[0], DataLoader)]
        return sampler is not None and any(loader._index_sampler is sampler for loader in loaders)

    def _walk(self, frame: FrameType) -> list[Held]:
        tensors = {id(parameter) for parameter in self._tracked.parameters.values()}
        for module in self._tracked.modules.values():
            tensors |= {id(tensor) for tensor in kinds.module_tensors(module)}
        walk = Walk(known_tensors=tensors, known=self._is_known, excused=self._tracked.excused)
        return walk.run(roots(frame))

    def _is_known(self, obj: Any) -> bool:
        if self._tracked.holds(obj):
            return True
        parts = [part for loader in self._tracked.loaders.values() for part in loader.parts()]
        parts += [part for schedule in self._tracked.schedulers.values() for part in getattr(schedule, "_schedulers", ())]
        return any(part is obj for part in parts)


def _by_hand(name: str) -> Finding:
    return Finding(
        severity="error",
        fatal=True,
        kind=kinds.LOADER.name,
        name=name,
        what="this tracked DataLoader is drawn from by hand, so tmd does not know how far it has come",
        why=kinds.LOADER.lost,
        remedy=f"take batches from step.batch or step.next_batch({name!r}) and do not iterate over it yourself",
    )


def _carried(names: list[str]) -> Finding:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return Finding(
        severity="error",
        fatal=True,
        kind="gradient",
        name=names[0],
        what=f"the gradient of {names[0]}{more} is carried from one step into the next and added to",
        why="what was accumulated before the step in which a rank is lost, on every rank",
        remedy="accumulate inside one `with step:`, with several calls of step.next_batch() and backward, and clear the "
        "gradients in each step",
    )


def _type_of(held: Held) -> str:
    """As people call it: several kinds are named Generator."""
    cls = type(held.obj)
    if held.kind is kinds.GENERATOR:
        return f"{cls.__module__.partition('.')[0]}.{cls.__name__}"
    return f"{cls.__name__} (an iterator)" if held.kind is kinds.ITERATOR else cls.__name__


def _with_article(type_name: str) -> str:
    return f"{'an' if type_name[:1] in 'AEIO' else 'a'} {type_name}"


def _finding_of(held: Held, what: str, *, severity: Severity, fatal: bool = False) -> Finding:
    name = held.node.path
    argument = re.sub(r"\W+", "_", name).strip("_") or "it"
    track = f"session.track({argument}={name})"
    return Finding(
        severity=severity,
        fatal=fatal,
        kind=held.kind.name,
        name=name,
        what=what.format(a_type=_with_article(_type_of(held))),
        where=held.node.where(),
        why=held.kind.lost,
        remedy=held.kind.remedy.format(track=track, name=argument, path=name),
    )
