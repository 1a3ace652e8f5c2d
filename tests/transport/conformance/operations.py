"""All operations, in one list."""

from tests.transport.conformance import functional, messages, movements, reductions
from tests.transport.conformance.registry import OPERATIONS, Run

__all__ = ["OPERATIONS", "Run", "functional", "messages", "movements", "reductions"]
