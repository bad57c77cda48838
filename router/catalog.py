"""The models that are served here, by the names that clients use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.api import TextCodec
from router.auth import Caller
from router.errors import ApiError, Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the router knows of a model. `created` is in Unix seconds; `max_model_len` counts prompt and output."""

    id: str
    max_model_len: int
    codec: TextCodec
    created: int
    owned_by: str = "roulant"
    aliases: tuple[str, ...] = ()


class Catalog:
    """Names to models. An alias stands for its model in every respect: rights, quota and metrics."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        """Raises ValueError if one name would stand for two models."""
        self._models = tuple(models)
        self._by_name: dict[str, ServedModel] = {}
        for model in models:
            for name in (model.id, *model.aliases):
                if name in self._by_name:
                    raise ValueError(f"two models are called {name!r}")
                self._by_name[name] = model

    def visible(self, caller: Caller) -> list[ServedModel]:
        """The models that this caller may use, in the order of the configuration."""
        return [model for model in self._models if caller.may_use(model.id)]

    def resolve(self, name: str | None, caller: Caller) -> ServedModel:
        """The model a request means. Without a name it is the only model that the caller may use.

        Raises ApiError: 404 for an unknown name, 403 for a model that the key may not use, 400 if a name is needed.
        """
        if name is None:
            visible = self.visible(caller)
            if len(visible) != 1:
                message = "model: name one of the models that GET /v1/models lists"
                raise ApiError(Fault.INVALID_REQUEST, message, param="model")
            return visible[0]
        model = self._by_name.get(name)
        if model is None:
            message = f"model: there is no model {name[:100]!r}; GET /v1/models lists the ones that there are"
            raise ApiError(Fault.MODEL_NOT_FOUND, message, param="model")
        if not caller.may_use(model.id):
            raise ApiError(Fault.MODEL_NOT_ALLOWED, f"model: this key may not use {name!r}", param="model")
        return model
