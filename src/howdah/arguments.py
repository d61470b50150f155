"""A function's signature as the shape of its job's data: arguments are bound and checked when they are
enqueued, stored by name, and converted to the annotated types when the function runs.

`{"path": "a.png", "width": 400}` is what a call `resize("a.png", 400)` becomes, so a job can be enqueued
from SQL and found by its arguments."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_type_hints

import msgspec

from howdah import payload
from howdah.errors import InvalidJob

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, slots=True)
class Arguments:
    """The signature of one function, less its context parameter."""

    name: str
    signature: inspect.Signature
    types: Mapping[str, Any]
    context: str | None
    returns: Any
    by_position: bool

    @classmethod
    def of(cls, function: Callable[..., Any], name: str, context_type: type) -> Arguments:
        """Read a function's signature. Annotations that cannot be resolved count as Any."""
        signature = inspect.signature(function)
        try:
            hints = get_type_hints(function)
        except Exception:
            hints = {}
        context = next(
            (
                parameter
                for parameter in signature.parameters
                if hints.get(parameter) is context_type
                or signature.parameters[parameter].annotation
                in (context_type, context_type.__name__)
            ),
            None,
        )
        parameters = [p for p in signature.parameters.values() if p.name != context]
        types = {p.name: hints.get(p.name, Any) for p in parameters}
        return cls(
            name,
            signature.replace(parameters=parameters),
            {parameter: type_ for parameter, type_ in types.items() if _is_supported(type_)},
            context,
            hints.get("return", Any),
            any(p.kind not in _BY_NAME for p in parameters),
        )

    def pack(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The data of a call, or an `InvalidJob` that says what does not fit the signature."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InvalidJob(f"{self.name}{self.signature}: {error}.", field="data") from None
        data = {name: to_json(value, name) for name, value in bound.arguments.items()}
        self.unpack(data)
        return data

    def unpack(self, data: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments, converted; an `InvalidJob` where the data do not fit."""
        if not isinstance(data, dict):
            raise InvalidJob(
                f"the data of {self.name} must be an object of its arguments, not "
                f"{type(data).__name__}.",
                field="data",
            )
        parameters = self.signature.parameters
        for name in data.keys() - parameters.keys():
            raise InvalidJob(f"{self.name} has no argument named {name!r}.", field="data")
        values: dict[str, Any] = {}
        for name, parameter in parameters.items():
            if name not in data:
                if parameter.default is parameter.empty and parameter.kind not in _VARIADIC:
                    raise InvalidJob(f"{self.name} misses its argument {name!r}.", field="data")
            elif parameter.kind is parameter.VAR_POSITIONAL:
                values[name] = tuple(self._convert(name, item) for item in data[name])
            elif parameter.kind is parameter.VAR_KEYWORD:
                values[name] = {key: self._convert(name, item) for key, item in data[name].items()}
            else:
                values[name] = self._convert(name, data[name])
        if not self.by_position:
            return (), values
        bound = inspect.BoundArguments(self.signature, values)
        bound.apply_defaults()
        return bound.args, bound.kwargs

    def _convert(self, name: str, value: Any) -> Any:
        type_ = self.types.get(name, Any)
        if type_ is Any:
            return value
        try:
            return msgspec.convert(value, type_, dec_hook=_from_json)
        except (msgspec.ValidationError, ValueError, TypeError) as error:
            raise InvalidJob(f"{self.name}: argument {name!r}: {error}.", field="data") from None


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def to_json(value: Any, name: str) -> Any:
    """A value as JSON's own types: dataclasses, datetimes, UUIDs, enums, structs and pydantic models."""
    try:
        return msgspec.to_builtins(value, str_keys=True, enc_hook=_to_builtin)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidJob(f"argument {name!r}: {error}.", field="data") from None


def encode_result(value: Any, limit: int) -> str | None:
    """A handler's result as JSON text. Raises `InvalidJob` for what JSON cannot hold."""
    if value is None:
        return None
    plain = to_json(value, "return value")
    return bytes(memoryview(payload.encode_data(plain, limit))).decode()


def decode_result(value: Any, type_: Any) -> Any:
    """A stored result as the type that the function says it returns, or as it is."""
    if value is None or not _is_supported(type_):
        return value
    try:
        return msgspec.convert(value, type_, dec_hook=_from_json)
    except (msgspec.ValidationError, ValueError, TypeError):
        return value


def _to_builtin(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)
    if dump is not None:
        return dump(mode="json")
    raise TypeError(f"a {type(value).__name__} cannot be stored as JSON")


def _from_json(type_: type, value: Any) -> Any:
    validate = getattr(type_, "model_validate", None)
    if validate is not None:
        return validate(value)
    raise TypeError(f"cannot make a {type_.__name__} from JSON")


def _is_supported(type_: Any) -> bool:
    if type_ is Any or type_ is inspect.Parameter.empty:
        return False
    try:
        msgspec.json.Decoder(type_, dec_hook=_from_json)
    except Exception:
        return False
    return True
