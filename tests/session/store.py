"""The rendezvous store of one job, in memory: the stand-in for the daemon's."""

from __future__ import annotations

from tmd.protocol.agent import StoreReply, StoreRequest


class Store:
    """The job's rendezvous store, as the daemon keeps it."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def answer(self, request: StoreRequest) -> StoreReply:
        found, value, number, key = True, b"", 0, request.key
        match request.operation:
            case "set":
                self.values[key] = request.value
            case "get":
                found, value = key in self.values, self.values.get(key, b"")
            case "add":
                number = int(self.values.get(key, b"0")) + request.amount
                self.values[key] = str(number).encode()
            case "compare_set":
                if self.values.get(key, b"") == request.expected:
                    self.values[key] = request.value
                value = self.values.get(key, request.expected)
            case "delete":
                found = self.values.pop(key, None) is not None
            case "check":
                found = all(k in self.values for k in request.keys)
            case "num_keys":
                number = len(self.values)
        return StoreReply(request_id=request.request_id, incarnation=request.incarnation, found=found, value=value, number=number)
