from __future__ import annotations

import pytest

from engine.api import TextCodec
from router.auth import Caller
from router.catalog import Catalog, ServedModel
from router.errors import ApiError

ANYONE = Caller(tenant="acme", key_id="k1")
ONLY_B = Caller(tenant="acme", key_id="k2", models=frozenset({"b"}))
NOBODY = Caller(tenant="acme", key_id="k3", models=frozenset())


def model(name: str, codec: TextCodec, *aliases: str) -> ServedModel:
    return ServedModel(id=name, max_model_len=64, codec=codec, created=0, aliases=aliases)


@pytest.fixture
def catalog(codec: TextCodec) -> Catalog:
    return Catalog([model("a", codec, "first"), model("b", codec, "second")])


def test_an_alias_stands_for_its_model(catalog: Catalog) -> None:
    assert catalog.resolve("first", ANYONE).id == "a"
    assert catalog.resolve("a", ANYONE).id == "a"


@pytest.mark.parametrize("name", ["nope", "A", "", "a/b%2f"])
def test_an_unknown_name_is_not_found(catalog: Catalog, name: str) -> None:
    with pytest.raises(ApiError) as caught:
        catalog.resolve(name, ANYONE)
    assert (caught.value.row.status, caught.value.row.code, caught.value.param) == (404, "model_not_found", "model")


@pytest.mark.parametrize("name", ["a", "first"])
def test_a_model_that_the_key_may_not_use_is_forbidden_by_every_name(catalog: Catalog, name: str) -> None:
    with pytest.raises(ApiError) as caught:
        catalog.resolve(name, ONLY_B)
    assert (caught.value.row.status, caught.value.param) == (403, "model")


def test_without_a_name_the_only_usable_model_is_meant(catalog: Catalog) -> None:
    assert catalog.resolve(None, ONLY_B).id == "b"


@pytest.mark.parametrize("caller", [ANYONE, NOBODY])
def test_without_a_name_several_or_no_models_need_one(catalog: Catalog, caller: Caller) -> None:
    with pytest.raises(ApiError) as caught:
        catalog.resolve(None, caller)
    assert (caught.value.row.status, caught.value.param) == (400, "model")


def test_callers_see_what_they_may_use(catalog: Catalog) -> None:
    assert [served.id for served in catalog.visible(ANYONE)] == ["a", "b"]
    assert [served.id for served in catalog.visible(ONLY_B)] == ["b"]


def test_one_name_for_two_models_is_refused(codec: TextCodec) -> None:
    with pytest.raises(ValueError, match="two models are called 'b'"):
        Catalog([model("a", codec, "b"), model("b", codec)])
