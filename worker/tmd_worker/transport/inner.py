"""What carries the collectives of one group in one epoch: tmd's own links (`delta`), or a group of another library.

Contract: every method that moves data is called in the group's thread, one after the other, by all members in the same order, and
returns when this member's part is done. `abort` may be called from any thread; whoever is inside then gets InnerBroken soon.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from tmd_worker.transport.tensors import Reduction


class InnerBroken(Exception):
    """The inner group cannot go on: a member died, a call timed out, or it was aborted."""


class Collectives(Protocol):
    """Ranks are group ranks. Tensors are dense, of any layout, and written in place; sizes have been checked."""

    def barrier(self) -> None: ...

    def allreduce(self, tensor: Tensor, kind: Reduction) -> None:
        """Every member ends with the same bits."""

    def reduce(self, tensor: Tensor, kind: Reduction, root: int) -> None:
        """The root's tensor becomes the reduction, the others' stay as they are."""

    def reduce_scatter(self, output: Tensor, blocks: Sequence[Tensor], kind: Reduction) -> None:
        """output = the reduction of everybody's blocks[own rank]; the blocks stay as they are."""

    def broadcast(self, tensor: Tensor, root: int) -> None: ...

    def allgather(self, outputs: Sequence[Tensor], own: Tensor) -> None:
        """outputs[i] = what member i passed as `own`. Sizes may differ between members, if all know them."""

    def gather(self, blocks: Sequence[Tensor] | None, own: Tensor, root: int) -> None:
        """At the root blocks[i] = what member i passed as `own`, all of one size; None on the others."""

    def scatter(self, output: Tensor, blocks: Sequence[Tensor] | None, root: int) -> None:
        """output = what the root passed as blocks[own rank], all of one size; None on the others."""

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """outputs[i] = what member i passed as inputs[own rank]."""


class InnerGroup(Collectives, Protocol):
    """One that is made before it is used, and retired after: what `gloo` and `nccl` have in common."""

    def abort(self) -> None:
        """Ends whatever is under way in it, here and, as they notice, on the other members. Returns at once."""

    def release(self) -> None:
        """Gives back its threads, sockets and memory; may take its time. Nothing is called afterwards."""
