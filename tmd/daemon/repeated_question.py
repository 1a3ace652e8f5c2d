"""A question that the resource manager is asked again and again, and whose answer the core is told when it changes.

Contract: while the manager does not answer nothing is told, so the last word stands; that it is silent is logged once.
"""

from __future__ import annotations

import abc
import asyncio
import logging
from typing import Generic, TypeVar

from tmd.nodes.base import ResourceManagerError

log = logging.getLogger("tmd.daemon")

_Word = TypeVar("_Word")


class RepeatedQuestion(abc.ABC, Generic[_Word]):
    """`unknown`: what is not known while nobody answers, as the beginning of a sentence."""

    unknown: str

    def __init__(self) -> None:
        self._told: _Word | None = None
        self._silent = False

    @abc.abstractmethod
    async def ask(self) -> _Word:
        """Raises ResourceManagerError."""

    @abc.abstractmethod
    def tell(self, word: _Word, before: _Word | None) -> None:
        """It is another one than `before`, or the first."""

    @abc.abstractmethod
    def pause_s(self, *, silent: bool) -> float:
        """Until it is asked again."""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                word = await self.ask()
            except ResourceManagerError as error:
                if not self._silent:
                    log.error("%s is not known, the resource manager does not answer: %s; asking again", self.unknown, error)
                self._silent = True
            else:
                self._silent = False
                if word != self._told:
                    before, self._told = self._told, word
                    self.tell(word, before)
            await asyncio.sleep(self.pause_s(silent=self._silent))
