"""The type of a key whose value is one of a few names, or code of the run's own, "file.py:name"."""
from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from meshtrain import custom


@dataclasses.dataclass(frozen=True)
class OneOf:
    """An annotation of a string key. names: the built-in names. contract: the interface that code of the run's own must
    have. The spelling of a value is checked here; the file of the code is checked with the run."""
    names: tuple[str, ...]
    contract: str

    def __get_pydantic_core_schema__(self, source: object, handler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: str) -> str:
        if value not in self.names and not custom.is_path(value) and (value or self.names):
            raise PydanticCustomError("literal_error", "is not one of the names")
        return value


def find(field: FieldInfo) -> OneOf | None:
    """Return the annotation of a key; None if it has none."""
    return next((one for one in field.metadata if isinstance(one, OneOf)), None)


def values(sections: Iterable[tuple[str, BaseModel]]) -> Iterator[tuple[str, str, str]]:
    """Yield (key, value, contract) of each key of these sections that names code of the run's own."""
    for section, table in sections:
        for key, field in type(table).model_fields.items():
            value, one_of = getattr(table, key), find(field)
            if one_of and custom.is_path(value):
                yield f"{section}.{key}", value, one_of.contract
                continue
            tables = [(f"[{i}]", part) for i, part in enumerate(value)] if isinstance(value, tuple) else [("", value)]
            yield from values((f"{section}.{key}{place}", part) for place, part in tables
                              if isinstance(part, BaseModel))
