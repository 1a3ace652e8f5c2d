"""What is registered is what was named, no byte more: tensors may lie between others."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tmd_worker.handoff.rdma_gpu import is_on_gpu
from tmd_worker.handoff.rdma_memory import joined
from tmd_worker.handoff.transfer import Memory

AREAS = st.lists(st.builds(Memory, st.integers(0, 60), st.integers(0, 12)), max_size=12)


@given(AREAS)
def test_areas_that_touch_are_one_and_together_they_cover_what_was_named(memory: list[Memory]) -> None:
    named = {address + offset for address, size in memory for offset in range(size)}
    areas = joined(memory)
    assert {address + offset for address, size in areas for offset in range(size)} == named
    assert all(area.size_bytes for area in areas)
    for before, after in itertools.pairwise(areas):
        assert before.address + before.size_bytes < after.address


def test_memory_of_a_process_that_uses_no_gpu_is_the_hosts() -> None:
    assert not is_on_gpu(Memory(1 << 40, 4096))
