"""The base of all parts of the configuration."""

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """A part of the configuration: unknown keys are refused, and it never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True)
