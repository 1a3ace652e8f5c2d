"""What a run came to, and how two runs are compared."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """`losses`: (rank, step) -> loss in hexadecimal; `digests`: rank -> digest of the final state."""

    losses: dict[tuple[int, int], str]
    digests: dict[int, str]

    @classmethod
    def of(cls, folder: Path) -> Outcome:
        """Reads what the training script wrote. A loss that was logged twice must read the same."""
        losses: dict[tuple[int, int], str] = {}
        for path in folder.glob("loss-*.jsonl"):
            for line in path.read_text().splitlines():
                row = json.loads(line)
                key = (row["rank"], row["step"])
                assert losses.setdefault(key, row["loss"]) == row["loss"], f"rank {key[0]} logged two losses of step {key[1]}"
        digests = {int(path.stem.split("-")[1]): path.read_text() for path in folder.glob("digest-*.txt")}
        return cls(losses, digests)

    def assert_same_as(self, reference: Outcome, *, unlogged: int = 0) -> None:
        """`unlogged`: as many lines may be missing, because the rank that had them was lost before it wrote them."""
        assert self.digests == reference.digests
        differing = {key: loss for key, loss in self.losses.items() if reference.losses[key] != loss}
        assert differing == {}
        missing = sorted(reference.losses.keys() - self.losses.keys())
        assert len(missing) <= unlogged, f"not logged: {missing}"
