"""`/v1/models`: its answers."""

from typing import Any, Literal

from pydantic import BaseModel, Field


class ModelCard(BaseModel):
    """A name that requests may use."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str = Field(description="The model behind the name.")
    parent: str | None
    max_model_len: int | None = Field(description="Tokens of context; null while it starts.")
    permission: list[Any]


class ModelList(BaseModel):
    """All names."""

    object: Literal["list"]
    data: list[ModelCard]
