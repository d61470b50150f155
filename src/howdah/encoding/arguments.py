"""Converts the arguments of a call to a job's data and back. Arguments are bound to the function's signature
and checked when they are enqueued, stored by name, and converted to the annotated types when the function
runs.

The call `resize("a.png", 400)` is stored as `{"path": "a.png", "width": 400}`, so a job can be enqueued from
SQL and found by its arguments. Decision 0018 explains why they are decoded in one pass."""

from __future__ import annotations

import contextlib
import inspect
import types
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec

from howdah.encoding import payload
from howdah.encoding.safe_logger import get_logger
from howdah.errors import InvalidJob

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Arguments:
    """The signature of one function.

    `full_signature` includes the context parameter, `signature` does not. `fast_decoder` decodes all
    arguments in one pass, and `exact_types` are their types if JSON holds values of these unchanged."""

    name: str
    full_signature: inspect.Signature
    signature: inspect.Signature
    types: Mapping[str, Any]
    context: str | None
    returns: Any
    by_position: bool
    names: tuple[str, ...]
    has_defaults: bool
    fast_decoder: msgspec.json.Decoder[msgspec.Struct] | None
    exact_types: list[Any] | None

    @classmethod
    def of(cls, function: Callable[..., Any], name: str, context_type: type) -> Arguments:
        """Read a function's signature. An annotation that cannot be resolved counts as Any."""
        full = inspect.signature(function)
        hints = _hints(function, name)
        context = next(
            (
                parameter.name
                for parameter in full.parameters.values()
                if _is_context(hints.get(parameter.name, parameter.annotation), context_type)
            ),
            None,
        )
        parameters = [p for p in full.parameters.values() if p.name != context]
        types = {p.name: hints.get(p.name, Any) for p in parameters}
        types = {parameter: type_ for parameter, type_ in types.items() if _is_supported(type_)}
        by_position = any(p.kind not in _BY_NAME for p in full.parameters.values())
        return cls(
            name,
            full,
            full.replace(parameters=parameters),
            types,
            context,
            hints.get("return", Any),
            by_position,
            tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD),
            any(p.default is not p.empty for p in parameters),
            None if by_position else _fast_decoder(parameters, types),
            None if by_position else _exact_types(parameters, types),
        )

    def pack(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The data of a call. Raises `InvalidJob` if an argument does not fit the signature."""
        if not kwargs and [*map(type, args)] == self.exact_types:
            return dict(zip(self.names, args, strict=True))
        if self.fast_decoder is not None and len(args) <= len(self.names):
            data = dict(zip(self.names, args, strict=False), **kwargs)
            try:
                data = msgspec.to_builtins(data, str_keys=True, enc_hook=_to_builtin)
                fits = self._decode_fast(msgspec.json.encode(data)) is not None
            except Exception:
                fits = False  # the code below names the argument
            if fits and len(data) == len(args) + len(kwargs):
                return data
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InvalidJob(f"{self.name}{self.signature}: {error}.", field="data") from None
        data = {name: to_json(value, name) for name, value in bound.arguments.items()}
        self.unpack(data)
        return data

    def unpack(self, data: Any, context: Any = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and keyword arguments, converted. Raises `InvalidJob` if the data do not fit.
        Data that are still JSON are decoded and converted in one pass if they fit."""
        if type(data) is msgspec.Raw:
            values = self._decode_fast(data)
            if values is not None:
                return self.place(values, context)
            data = payload.decode(bytes(data).decode())
        if not isinstance(data, dict):
            raise InvalidJob(
                f"the data of {self.name} must be an object of its arguments, not "
                f"{type(data).__name__}.",
                field="data",
            )
        parameters = self.signature.parameters
        values = {}
        for name, parameter in parameters.items():
            if name in data:
                values[name] = self._convert_parameter(parameter, data[name])
            elif parameter.default is parameter.empty and parameter.kind not in _VARIADIC:
                raise InvalidJob(f"{self.name} is missing its argument {name!r}.", field="data")
        if len(values) < len(data):
            unknown = next(name for name in data if name not in parameters)
            raise InvalidJob(f"{self.name} has no argument named {unknown!r}.", field="data")
        return self.place(values, context)

    def _decode_fast(self, text: bytes | msgspec.Raw) -> dict[str, Any] | None:
        """The arguments in a JSON text, or None if they do not fit. Converting them one by one then finds
        the argument to name."""
        if self.fast_decoder is None:
            return None
        try:
            values = msgspec.structs.asdict(self.fast_decoder.decode(text))
        except Exception:  # validators of the user's types may raise anything
            return None
        if self.has_defaults:
            return {name: value for name, value in values.items() if value is not msgspec.UNSET}
        return values

    def place(self, values: dict[str, Any], context: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Values by name, and the context, as positional and keyword arguments."""
        if self.context is not None:
            values[self.context] = context
        if not self.by_position:
            return (), values
        bound = inspect.BoundArguments(self.full_signature, values)
        bound.apply_defaults()
        return bound.args, bound.kwargs

    def _convert_parameter(self, parameter: inspect.Parameter, value: Any) -> Any:
        name = parameter.name
        if parameter.kind is parameter.VAR_POSITIONAL:
            if not isinstance(value, list | tuple):
                raise self._does_not_fit(name, f"expected a list, got {type(value).__name__}")
            return tuple(self._convert(name, item) for item in value)
        if parameter.kind is parameter.VAR_KEYWORD:
            if not isinstance(value, dict):
                raise self._does_not_fit(name, f"expected an object, got {type(value).__name__}")
            for twice in value.keys() & self.full_signature.parameters.keys():
                raise self._does_not_fit(name, f"{twice!r} is also a named argument")
            return {key: self._convert(name, item) for key, item in value.items()}
        return self._convert(name, value)

    def _convert(self, name: str, value: Any) -> Any:
        type_ = self.types.get(name, Any)
        if type_ is Any:
            return value
        try:
            return msgspec.convert(value, type_, str_keys=True, dec_hook=_from_json)
        except Exception as error:  # validators of the user's types may raise anything
            raise self._does_not_fit(name, str(error) or type(error).__name__) from None

    def _does_not_fit(self, name: str, why: str) -> InvalidJob:
        return InvalidJob(f"{self.name}: argument {name!r}: {why.rstrip('.')}.", field="data")


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _fast_decoder(
    parameters: Sequence[inspect.Parameter], types: Mapping[str, Any]
) -> msgspec.json.Decoder[msgspec.Struct] | None:
    """A decoder for arguments that can all be passed by name, as one struct: ten times as fast as converting
    one after the other."""
    fields: list[Any] = []
    try:
        for parameter in parameters:
            type_ = types.get(parameter.name, Any)
            if parameter.default is parameter.empty:
                fields.append((parameter.name, type_))
            else:
                fields.append((parameter.name, type_ | msgspec.UnsetType, msgspec.UNSET))
        struct = msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=True)
        return msgspec.json.Decoder(struct, dec_hook=_from_json)
    except Exception:  # some types cannot be in a union: their arguments are converted one by one
        return None


def _exact_types(
    parameters: Sequence[inspect.Parameter], types: Mapping[str, Any]
) -> list[Any] | None:
    """The types of the arguments if JSON holds values of all of them unchanged, so that no value needs to be
    checked. Not floats: JSON has no NaN and no infinity."""
    exact = [types.get(parameter.name) for parameter in parameters]
    by_place = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    return exact if by_place and all(each in (str, int, bool) for each in exact) else None


def to_json(value: Any, name: str) -> Any:
    """Convert a value to JSON's types: dataclasses, datetimes, UUIDs, enums, structs and pydantic models."""
    try:
        return msgspec.to_builtins(value, str_keys=True, enc_hook=_to_builtin)
    except Exception as error:  # a user's type may raise anything
        raise InvalidJob(f"argument {name!r}: {error}.", field="data") from None


def encode_result(value: Any, limit: int) -> str | None:
    """A handler's result as JSON text. Raises `InvalidJob` if JSON cannot represent it."""
    if value is None:
        return None
    try:
        plain = msgspec.to_builtins(value, str_keys=True, enc_hook=_to_builtin)
    except Exception as error:
        raise InvalidJob(f"{error}.", field="result") from None
    return bytes(memoryview(payload.encode_data(plain, limit))).decode()


def decode_result(value: Any, type_: Any) -> Any:
    """A stored result, converted to the annotated return type if possible."""
    if value is None or not _is_supported(type_):
        return value
    try:
        return msgspec.convert(value, type_, str_keys=True, dec_hook=_from_json)
    except Exception:
        return value


def _to_builtin(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)
    if dump is not None:
        return dump(mode="json")
    if isinstance(value, PurePath):
        return str(value)
    raise TypeError(f"a {type(value).__name__} cannot be stored as JSON")


def _from_json(type_: Any, value: Any) -> Any:
    # From JSON: in that mode a strict model accepts a string for a datetime, too.
    validate = getattr(type_, "model_validate_json", None)
    if validate is not None:
        return validate(msgspec.json.encode(value))
    if isinstance(type_, type) and issubclass(type_, PurePath) and isinstance(value, str):
        return type_(value)
    raise TypeError(f"cannot make a {getattr(type_, '__name__', type_)} from JSON")


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    with contextlib.suppress(Exception):
        return get_type_hints(function, include_extras=True)
    # One annotation cannot be resolved, perhaps imported under TYPE_CHECKING. Try each by itself.
    bare = inspect.unwrap(function)
    hints: dict[str, Any] = {}
    for parameter, annotation in inspect.get_annotations(bare).items():
        one = types.SimpleNamespace(__annotations__={parameter: annotation})
        try:
            hints |= get_type_hints(one, getattr(bare, "__globals__", {}), include_extras=True)
        except Exception:
            if parameter != "return" and not _names_context(annotation):
                logger.warning(
                    "an annotation cannot be resolved; the argument is passed as decoded from JSON",
                    extra={"task": name, "argument": parameter, "annotation": str(annotation)},
                )
    return hints


def _is_context(annotation: Any, context_type: type) -> bool:
    if isinstance(annotation, str):
        return _names_context(annotation)
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        return context_type in get_args(annotation)
    return annotation is context_type


def _names_context(annotation: Any) -> bool:
    """Whether an unresolved annotation is `Context`, `Context | None` and so on."""
    return isinstance(annotation, str) and any(
        part.strip().rpartition(".")[2] == "Context" for part in annotation.split("|")
    )


def _is_supported(type_: Any) -> bool:
    if type_ is Any or type_ is inspect.Parameter.empty:
        return False
    try:
        msgspec.json.Decoder(type_, dec_hook=_from_json)
    except Exception:
        return False
    return True
