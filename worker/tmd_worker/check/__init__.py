"""State that a training script holds and that tmd was not told of: looked for at the first step, and by `tmd-run --check`."""
