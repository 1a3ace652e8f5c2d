"""Bytes to messages and back: MessagePack, a bound on every size, a clear refusal of what does not fit."""

from __future__ import annotations

import struct
from typing import Any, Generic, TypeVar

import msgspec

from tmd.protocol.agent import FromAgent, ToAgent
from tmd.protocol.control import FromRank, ToRank

#: (major, minor). Another major is refused; an older minor is served: new fields have defaults, unknown ones are ignored.
PROTOCOL = (1, 3)
MAX_MESSAGE_BYTES = 4 << 20
#: Length prefix on stream sockets: unsigned 32-bit, network order.
LENGTH = struct.Struct("!I")

_Message = TypeVar("_Message")


class MessageRefused(ValueError):
    """A message is too large, malformed or of an unknown kind; the text names which."""


class Codec(Generic[_Message]):
    """Encodes and decodes one family of messages."""

    def __init__(self, family: Any, name: str) -> None:
        self._decoder = msgspec.msgpack.Decoder(family)
        self._encoder = msgspec.msgpack.Encoder()
        self._name = name

    def encode(self, message: _Message) -> bytes:
        """Raises MessageRefused if the message is larger than MAX_MESSAGE_BYTES. What is no text in it (half of a surrogate pair,
        as in the name of a file that is not UTF-8) arrives as an escape."""
        try:
            data = self._encoder.encode(message)
        except UnicodeEncodeError:
            data = self._encoder.encode(_escaped(msgspec.to_builtins(message, builtin_types=(bytes, bytearray, memoryview))))
        if len(data) > MAX_MESSAGE_BYTES:
            kind = type(message).__name__
            raise MessageRefused(f"{kind} has {len(data)} bytes, the limit is {MAX_MESSAGE_BYTES}")
        return data

    def decode(self, data: bytes | bytearray | memoryview) -> _Message:
        """Raises MessageRefused with what is wrong and where."""
        if len(data) > MAX_MESSAGE_BYTES:
            raise MessageRefused(f"message {self._name} has {len(data)} bytes, the limit is {MAX_MESSAGE_BYTES}")
        try:
            message: _Message = self._decoder.decode(data)
        except msgspec.DecodeError as error:
            raise MessageRefused(f"message {self._name} refused: {error}") from None
        return message


def _escaped(value: Any) -> Any:
    """The same with only what UTF-8 has."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_escaped(key): _escaped(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_escaped(entry) for entry in value]
    return value


class FrameReader(Generic[_Message]):
    """Cuts a byte stream into length-prefixed messages; no I/O of its own."""

    def __init__(self, codec: Codec[_Message]) -> None:
        self._codec = codec
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[_Message]:
        """Returns the messages that `data` completes. Raises MessageRefused; the stream is then unusable."""
        self._buffer += data
        messages = []
        while len(self._buffer) >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._buffer)
            if size > MAX_MESSAGE_BYTES:
                raise MessageRefused(f"frame announces {size} bytes, the limit is {MAX_MESSAGE_BYTES}")
            if len(self._buffer) < LENGTH.size + size:
                break
            messages.append(self._codec.decode(bytes(self._buffer[LENGTH.size : LENGTH.size + size])))
            del self._buffer[: LENGTH.size + size]
        return messages


def frame(data: bytes) -> bytes:
    """Adds the length prefix."""
    return LENGTH.pack(len(data)) + data


FROM_AGENT: Codec[FromAgent] = Codec(FromAgent, "agent to daemon")
TO_AGENT: Codec[ToAgent] = Codec(ToAgent, "daemon to agent")
FROM_RANK: Codec[FromRank] = Codec(FromRank, "rank to agent")
TO_RANK: Codec[ToRank] = Codec(ToRank, "agent to rank")


def check_protocol(theirs: tuple[int, int]) -> str | None:
    """None if a peer of this version can be served, else the reason why not."""
    if theirs[0] != PROTOCOL[0]:
        return (
            f"protocol {theirs[0]}.{theirs[1]} is not served: this side speaks {PROTOCOL[0]}.{PROTOCOL[1]}; "
            "install the same tmd major version on head and compute nodes"
        )
    return None
