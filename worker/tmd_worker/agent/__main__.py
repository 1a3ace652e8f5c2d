"""`python -m tmd_worker.agent` is `tmd-run`."""

from tmd_worker.agent.main import main

if __name__ == "__main__":
    main()
