from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from engine.api import TextCodec
from router.api import build_http_app
from tests.router.fakes import KEY, House, make_codec


@pytest.fixture(scope="session")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return make_codec(tmp_path_factory.mktemp("tiny-tokenizer"))


@pytest.fixture
def house(codec: TextCodec) -> House:
    return House(codec)


@pytest.fixture
async def client(house: House) -> AsyncIterator[httpx.AsyncClient]:
    """A client with a tenant's key, straight into the application."""
    transport = httpx.ASGITransport(app=build_http_app(house.wiring()), raise_app_exceptions=False)
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://router", headers=headers) as client:
        yield client
