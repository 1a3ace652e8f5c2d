"""Structured log lines: time, level, text, then the fields (job, migration, epoch, …), as logfmt or as JSON."""

from __future__ import annotations

import datetime
import json
import logging
import sys
from typing import Literal

#: What a line may carry through `extra`, in the order in which it is printed.
FIELDS = ("job", "migration", "node", "agent", "epoch", "event", "cause", "uid")


class _Formatter(logging.Formatter):
    def fields(self, record: logging.LogRecord) -> dict[str, object]:
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        fields: dict[str, object] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "msg": record.getMessage(),
        }
        fields |= {name: value for name in FIELDS if (value := getattr(record, name, None)) not in (None, "")}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return fields


class JsonFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(self.fields(record), default=str)


class LogfmtFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return " ".join(f"{name}={_quoted(str(value))}" for name, value in self.fields(record).items())


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if not text or any(c in text for c in ' "=\n\t') else text


def configure(log_format: Literal["logfmt", "json"], level: str) -> None:
    """All log lines of this process go to standard error, in this format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else LogfmtFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Libraries speak up when something is wrong; what they do otherwise says nothing about jobs.
    for library in ("aiohttp", "aiosqlite", "alembic", "asyncio", "sqlalchemy"):
        logging.getLogger(library).setLevel(logging.WARNING)
