"""Fixtures of the target's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from toy_target import TOY_LIMITS, Client, Start, ToyConfig, ToyRunner, make_engine

from target_service.config import Limits
from target_service.engine import Engine


@pytest.fixture
def start() -> Iterator[Start]:
    """Builds toy engines; at the end none may hold a page."""
    engines: list[Engine] = []

    def build(
        limits: Limits = TOY_LIMITS, *, eos: tuple[int, ...] = (), **kwargs: object
    ) -> tuple[ToyRunner, Engine, Client]:
        runner = ToyRunner(num_pages=limits.num_pages, config=ToyConfig(eos_token_ids=eos))
        engine = make_engine(runner, limits, **kwargs)
        engine.start()
        engines.append(engine)
        return runner, engine, Client(engine)

    yield build
    for engine in engines:
        engine.close()
        assert engine._cache.used == 0
        engine._cache.pool.check()
