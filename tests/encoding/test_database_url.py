"""Database URLs: where they come from, their forms, and that messages never show a password."""

from __future__ import annotations

import inspect

import asyncpg.connect_utils
import psycopg.conninfo
import pytest

from howdah.encoding import database_url
from howdah.errors import InvalidOption


@pytest.mark.parametrize(
    ("argument", "environ", "expected"),
    [
        ("a", {"HOWDAH_DATABASE_URL": "b", "DATABASE_URL": "c"}, "a"),
        (None, {"HOWDAH_DATABASE_URL": "b", "DATABASE_URL": "c"}, "b"),
        (None, {"DATABASE_URL": "c"}, "c"),
        (None, {"HOWDAH_DATABASE_URL": "", "DATABASE_URL": "c"}, "c"),
        (None, {}, None),
    ],
)
def test_the_argument_takes_precedence_over_the_environment(argument, environ, expected):
    assert database_url.database_url(argument, environ) == expected


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("postgres://u:p@h:1/d", "postgresql://u:p@h:1/d"),
        ("postgresql://u:p@h:1/d", "postgresql://u:p@h:1/d"),
        ("postgresql+asyncpg://u@h/d?ssl=require", "postgresql://u@h/d?sslmode=require"),
        ("postgresql+psycopg://u@h/d", "postgresql://u@h/d"),
        ("postgresql+psycopg2://u@/d?host=/tmp/x y", "postgresql://u@/d?host=/tmp/x y"),
        ("POSTGRES://u:p%40%2F@h/d ", "postgresql://u:p%40%2F@h/d"),
        (
            "postgres://u:p@h/d?sslmode=require&channel_binding=require&connect_timeout=3",
            "postgresql://u:p@h/d?sslmode=require",
        ),
        ("postgres://h/d?connect_timeout=3", "postgresql://h/d"),
        ("postgres://h/d?options=-c%20geqo%3Doff", "postgresql://h/d?options=-c%20geqo%3Doff"),
    ],
)
def test_every_form_of_a_url_is_converted_to_the_form_that_both_drivers_accept(url, expected):
    assert database_url.normalize_url(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+asyncpg://u:p%40@db:6000/shop?ssl=true&connect_timeout=3",
        "postgresql://u:p@/shop?host=/tmp/sockets&port=6000",
        "postgres://u@%2Ftmp%2Fsockets:6000/shop",
    ],
)
def test_both_drivers_parse_a_normalized_url_alike(url):
    normal = database_url.normalize_url(url)
    libpq = psycopg.conninfo.conninfo_to_dict(normal)
    parse = asyncpg.connect_utils._parse_connect_dsn_and_args
    nothing = dict.fromkeys(inspect.signature(parse).parameters)
    addresses, read = parse(**{**nothing, "dsn": normal})
    assert (read.user, read.database, read.password) == (
        libpq["user"],
        libpq["dbname"],
        libpq.get("password"),
    )
    address = addresses[0]
    host = libpq["host"]
    expected = f"{host}/.s.PGSQL.6000" if host.startswith("/") else (host, 6000)
    assert address == expected
    assert not read.server_settings


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("mysql://u:secret@h/d", "begins with mysql://"),
        ("postgresql+pg8000://u:secret@h/d", "begins with postgresql+pg8000://"),
        ("u:secret@h/d", "begins with no scheme"),
        ("secret@h/x://y", "begins with no scheme"),
        ("", "begins with no scheme"),
    ],
)
def test_another_url_is_refused_without_showing_a_password(url, found):
    with pytest.raises(
        InvalidOption, match=r"the database URL begins with .* write it as"
    ) as caught:
        database_url.normalize_url(url)
    assert found in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "is_embedded", "directory"),
    [
        ("embedded:", True, None),
        ("embedded://", True, None),
        ("embedded:/some/dir", True, "/some/dir"),
        ("embedded:///some/dir", True, "/some/dir"),
        ("embedded:data", True, "data"),
        ("postgresql://embedded:x@h/d", False, "-"),
    ],
)
def test_an_embedded_server_can_be_asked_for_by_url(url, is_embedded, directory):
    assert database_url.is_embedded(url) is is_embedded
    if is_embedded:
        assert database_url.embedded_directory(url) == directory


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("postgresql://u:s3cret@db.example.com:6000/shop", ("db.example.com:6000", "shop")),
        ("postgresql://u:s3cret@/shop?host=/tmp/x&password=s3cret", ("/tmp/x", "shop")),
        ("postgresql://a:1,b:2/shop", ("a:1,b:2", "shop")),
        ("postgresql://u:s3@cret/@h/shop", ("h", "shop")),
        ("postgresql://", ("localhost", "(default)")),
    ],
)
def test_messages_name_the_host_and_the_database_and_no_password(url, expected):
    assert database_url.host_and_database(url) == expected
    assert database_url.redact(url) == f'database "{expected[1]}" at {expected[0]}'


@pytest.mark.parametrize("special", "?#@")
def test_a_password_with_special_characters_is_not_parsed_as_a_host(special):
    url = f"postgresql://user:first{special}second@db.example.com/shop"
    with pytest.raises(InvalidOption, match="special characters in the password percent-encoded"):
        database_url.normalize_url(url)


def test_an_at_sign_in_an_option_is_accepted():
    url = "postgresql://db.example.com/shop?user=a@b"
    assert database_url.normalize_url(url) == url
