"""Every address of the project, read from its resolver, so that no test of who may do what can forget one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from django.urls import URLPattern, URLResolver, get_resolver
from django.utils.regex_helper import normalize


@dataclass(frozen=True)
class Route:
    """An address without its last slash (`/api/v1/jobs/{id}/log`), and the methods that its view has.

    The methods of a page that is a function are not known from outside: the tables of the tests say them.
    """

    address: str
    methods: tuple[str, ...]
    slash: str = "/"

    def __str__(self) -> str:
        return self.address

    @property
    def for_programs(self) -> bool:
        return self.address.startswith(("/api/v1/", "/system/", "/metrics"))

    def at(self, **values: Any) -> str:
        """The address with real values in it, as it is documented."""
        return re.sub(r"{(\w+)}", lambda found: str(values[found[1]]), self.address) + self.slash


def routes() -> list[Route]:
    """All of them, each once."""
    return list({route.address: route for route in _below(get_resolver())}.values())


def _below(resolver: URLResolver, prefix: str = "") -> Iterator[Route]:
    for entry in resolver.url_patterns:
        pattern = prefix + entry.pattern.regex.pattern.lstrip("^")
        if isinstance(entry, URLResolver):
            yield from _below(entry, pattern)
            continue
        # The first form is the one without what may be left out.
        form, names = normalize(pattern.replace(r"\Z", ""))[0]
        address = "/" + form % {name: f"{{{name}}}" for name in names}
        # A file's path ends where it ends; everything else has a form with a slash.
        slash = "/" if pattern.endswith(("/?$", r"/\Z")) else ""
        yield Route(address.rstrip("/") or "/", methods_of(entry), slash if address != "/" else "")


def methods_of(entry: URLPattern) -> tuple[str, ...]:
    view = getattr(entry.callback, "cls", None) or getattr(entry.callback, "view_class", None)
    if view is None:
        return ()
    offered = (name for name in view.http_method_names if name not in ("head", "options"))
    return tuple(name.upper() for name in offered if hasattr(view, name))
