"""Whatever is sent, the answer is sound: no fault of the server, nothing half done, one shape of error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import pytest
import requests
import schemathesis
from axes.models import AccessAttempt
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from drf_spectacular.generators import SchemaGenerator
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode

from gpus.models import Gpu, GpuEvent
from jobs import registry
from jobs.models import Artifact, Job, JobEvent, JobInput
from monitor.models import ApiToken
from tests.security import nasty
from tests.security.conftest import World, browser, undone
from tests.security.routes import Route, routes

pytestmark = pytest.mark.django_db
KEPT = (Job, JobInput, JobEvent, Artifact, ApiToken, Gpu, GpuEvent)
#: Of each kind (sound, broken) for each address and method; the slow run asks for more.
EXAMPLES, MANY_EXAMPLES = 8, 150
#: The schema leaves it out: it only says which kinds there are.
UNDOCUMENTED = {"/api/v1/jobs/{kind}"}
#: What any list, log or curve takes; sent everywhere, also where nobody reads it.
KNOWN_NAMES = (
    *("page", "page_size", "ordering", "tail", "offset", "points", "names", "from", "to", "metric", "ids"),
    *("created_after", "gpu_id", "host", "uuid", "event", "kind", "status", "owner", "job", "group_id", "q"),
)
PAGE_NAMES = (
    *("status", "kind", "mine", "from", "ids", "type", "owner", "q", "gpu", "name", "shared", "next", "key"),
    *("_q", "o", "p", "e", "card", "minutes", "since", "note", "max_jobs", "interactive_slots", "enabled"),
)
API = [route for route in routes() if route.for_programs]
PAGES = [route for route in routes() if not route.for_programs]
ADMIN = [route for route in PAGES if route.address.startswith("/admin")]
OURS = [route for route in PAGES if route not in ADMIN]
#: The placeholders of the admin, which are not in our world.
ADMIN_VALUES = dict.fromkeys(("id", "object_id", "content_type_id", "app_label", "url", "from_field"), "1")
ASKED = [(route, method) for route in API for method in route.methods]
DESCRIBED = [
    (route, method)
    for route, method in ASKED
    if route.address.startswith("/api/v1/") and route.address not in UNDOCUMENTED
]


@dataclass
class Knocker:
    """Sends requests as the owner, who is also staff, so that none ends at a permission; notes what is unsound."""

    client: Client
    before: tuple[int, ...]
    sent: int = 0
    unsound: list[str] = field(default_factory=list)

    def knock(self, method: str, address: str, body: bytes = b"", type: str = "", **headers: str) -> Any:
        with undone():
            answer = self.client.generic(method, address, body, type, **headers)  # type: ignore[arg-type]
            changed = answer.status_code >= 400 and not lost() and rows() != self.before
        self.sent += 1
        if wrong := fault_of(address, answer) or (changed and "refused, yet rows changed"):
            self.unsound.append(f"{method} {address[:200]} {body[:200]!r} {type[:60]}: {wrong}")
        return answer

    def form(self, address: str, fields: dict[str, str]) -> Any:
        return self.knock("POST", address, urlencode(fields).encode(), "application/x-www-form-urlencoded")

    def json(self, method: str, address: str, body: Any) -> Any:
        return self.knock(method, address, json.dumps(body).encode(), "application/json")


def lost() -> bool:
    """PostgreSQL threw the transaction away when it met the input: nothing in it is kept, nor can be counted."""
    if connection.vendor != "postgresql":
        return False
    return connection.connection.info.transaction_status.name == "INERROR"


def rows() -> tuple[int, ...]:
    """How many there are of everything that a request may make, in one query."""
    tables = (f"(SELECT COUNT(*) FROM {model._meta.db_table})" for model in KEPT)
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {', '.join(tables)}")
        return tuple(cursor.fetchone())


def fault_of(address: str, answer: Any) -> str:
    """Why the answer is not one that may be given to input; empty when it may."""
    down = answer.status_code == 503 and "/system/health" in address
    if answer.status_code >= 500 and not down:
        return f"{answer.status_code} {getattr(answer, 'exc_info', None) and answer.exc_info[1]!r}"
    if answer.status_code >= 400 and not down and address.startswith(("/api/v1/", "/system/")):
        return "" if is_envelope(answer) else f"{answer.status_code} without code and detail"
    return ""


def is_envelope(answer: Any) -> bool:
    try:
        said = json.loads(answer.content)
    except ValueError:
        return False
    return isinstance(said, dict) and all(
        isinstance(said.get(k), str) and said[k] for k in ("code", "detail")
    )


@pytest.fixture
def knocker(world: World, alice: User) -> Iterator[Knocker]:
    User.objects.filter(pk=alice.pk).update(is_staff=True, is_superuser=True)
    at_work = Knocker(browser(alice), rows())
    yield at_work
    assert at_work.unsound == []
    assert at_work.sent > 0


# What the schema says -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def described() -> Any:
    """The project's own description, as schemathesis reads it."""
    config = schemathesis.Config()
    config.projects.default.generation.update(with_security_parameters=False)
    raw = SchemaGenerator().get_schema(request=None, public=True)
    return schemathesis.openapi.from_dict(json.loads(json.dumps(raw, default=str)), config=config)


def operation_of(described: Any, route: Route, method: str) -> Any:
    return described[route.address + route.slash][method]


def each(pairs: list[tuple[Route, str]]) -> Any:
    return pytest.mark.parametrize(("route", "method"), pairs, ids=[f"{m} {r}" for r, m in pairs])


def test_the_schema_describes_every_address(described: Any) -> None:
    missing = [
        f"{method} {route}"
        for route, method in DESCRIBED
        if route.address + route.slash not in described
        or method not in described[route.address + route.slash]
    ]
    assert missing == []
    assert len(DESCRIBED) > 40


@each(DESCRIBED)
def test_generated_input_does_no_harm(
    described: Any, knocker: Knocker, world: World, route: Route, method: str
) -> None:
    generated(operation_of(described, route, method), knocker, world, EXAMPLES)


@pytest.mark.slow
@pytest.mark.timeout(600)
@each(DESCRIBED)
def test_much_generated_input_does_no_harm(
    described: Any, knocker: Knocker, world: World, route: Route, method: str
) -> None:
    operation = operation_of(described, route, method)
    generated(operation, knocker, world, MANY_EXAMPLES)
    generation = described.config.generation
    for case in described.iter_coverage_cases(
        operation, generation_modes=list(GenerationMode), generation_config=generation
    ):
        send(case, knocker, {})


def generated(operation: Any, knocker: Knocker, world: World, examples: int) -> None:
    """Sound and broken cases, at addresses of things that exist and of things that do not."""
    real = values_at(world, operation.path)
    takes_input = bool(operation.path_parameters or operation.query or operation.body)
    for mode in GenerationMode if takes_input else [GenerationMode.POSITIVE]:

        @settings(
            max_examples=examples,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(operation.as_strategy(generation_mode=mode), st.booleans())
        def run(case: Case, exists: bool) -> None:
            send(case, knocker, real if exists else {})

        run()


def values_at(world: World, address: str) -> dict[str, Any]:
    return {k: str(v) for k, v in world.values(id=world.id_for(address)).items() if f"{{{k}}}" in address}


def send(case: Case, knocker: Knocker, real: dict[str, Any]) -> None:
    """The case as `requests` would put it on the wire, with `real` at the placeholders of its address."""
    if real:
        case.path_parameters = {**case.path_parameters, **real}
    try:
        wire = requests.Request(**case.as_transport_kwargs(base_url="http://testserver")).prepare()
    except (ValueError, requests.exceptions.RequestException):
        return  # no client can send it
    body = wire.body.encode() if isinstance(wire.body, str) else wire.body or b""
    address = urlsplit(wire.url)
    path = address.path + (f"?{address.query}" if address.query else "")
    knocker.knock(str(wire.method), path, body, wire.headers.get("Content-Type", ""))


# What we know to be nasty -------------------------------------------------------------------------------


def at(world: World, route: Route, **values: Any) -> str:
    return route.at(**world.values(id=world.id_for(route.address)) | values)


WRITTEN = [(route, method) for route, method in ASKED if method in ("POST", "PATCH")]


@each(WRITTEN)
def test_nasty_bodies_do_no_harm(knocker: Knocker, world: World, route: Route, method: str) -> None:
    for body in nasty.BODIES.values():
        knocker.knock(method, at(world, route), body, "application/json")
    for content_type in nasty.CONTENT_TYPES:
        knocker.knock(method, at(world, route), b'{"name": "a"}', content_type)


COMMON = {"gpu": 0, "name": "a", "priority": 1, "after": [], "hold": False, "idempotency_key": "k"}


def good_body(route: Route) -> dict[str, Any]:
    """A body that is sound, so that one nasty value in it is what the answer is about."""
    name = route.address.rsplit("/", 1)[1]
    if name in registry.names():
        kind = registry.get(name)
        if name == "rehearsal":
            return dict(kind.example) | COMMON  # what all kinds take has the same code for all
        return dict.fromkeys(kind.Params().fields) | dict(kind.example) | {"gpu": 0}
    return {
        "tokens": {"name": "a", "scopes": ["read"], "expires_at": None},
        "hub-token": {"token": "hf_123456789"},
        "gpu-fit": {"kind": "rehearsal", "params": {"steps": 1}, "gpu": 0},
        "{uuid}": {"enabled": True, "max_jobs": 1, "interactive_slots": 1, "note": "a"},
        "retry": {"gpu": 0, "from": "start", "params": {"steps": 1}},
        "resume": {"gpu": 0},
        "artifacts": {"name": "a", "type": "corpus", "file": "a"},
        "{id}": {"name": "a", "shared": True},
    }.get(name, {"gpu": 0})  # what takes no body gets one


@each(WRITTEN)
def test_one_nasty_value_does_no_harm(knocker: Knocker, world: World, route: Route, method: str) -> None:
    body = {name: value for name, value in good_body(route).items() if value is not None}
    for name in good_body(route):
        for value in nasty.VALUES:
            knocker.json(method, at(world, route), body | {name: value})


READ = [(route, method) for route, method in ASKED if method == "GET"]


@each(READ)
def test_nasty_queries_do_no_harm(
    described: Any, knocker: Knocker, world: World, route: Route, method: str
) -> None:
    address = at(world, route)
    for name in documented(described, route):
        for word in nasty.WORDS:
            knocker.knock(method, f"{address}?{urlencode({name: word})}")
    for word in nasty.WORDS[::3]:
        knocker.knock(method, f"{address}?{urlencode(dict.fromkeys(KNOWN_NAMES, word))}")
    for raw in ("%", "%ff=%ff", "page=%00", "=&=&;", "page=1&page=2", "page[]=1", "&".join(["a=1"] * 1500)):
        knocker.knock(method, f"{address}?{raw}")


def documented(described: Any, route: Route) -> list[str]:
    if not route.address.startswith("/api/v1/"):
        return []  # the seed's addresses have the same views
    return [parameter.name for parameter in operation_of(described, route, "GET").query]


PLACED = [(route, method) for route, method in ASKED if "{" in route.address]


@each(PLACED)
def test_nasty_addresses_do_no_harm(knocker: Knocker, world: World, route: Route, method: str) -> None:
    for name in values_at(world, route.address):
        for segment in nasty.SEGMENTS:
            knocker.knock(method, at(world, route, **{name: segment}), b"{}", "application/json")


def test_a_path_never_leads_out_of_its_folder(knocker: Knocker, world: World) -> None:
    """The answer to any path is the one file that is there, or 404."""
    files = [route for route in API if route.address.endswith("/files/{path}")]
    assert len(files) == 2
    for route in files:
        for segment in nasty.SEGMENTS:
            answer = knocker.knock("GET", at(world, route, path=segment))
            assert answer.status_code in (200, 404), segment
            assert answer.status_code == 404 or answer["Content-Disposition"].endswith('"hello.txt"')


@pytest.mark.parametrize("wanted", nasty.RANGES)
def test_nasty_ranges_do_no_harm(knocker: Knocker, world: World, wanted: str) -> None:
    for route in API:
        if route.address.endswith("/files/{path}"):
            assert knocker.knock("GET", at(world, route), HTTP_RANGE=wanted).status_code in (206, 416)


# Pages --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", OURS, ids=str)
def test_pages_take_nasty_input(knocker: Knocker, world: World, route: Route) -> None:
    words = (*nasty.TEXTS, "9" * 5000, "-1", "²")
    # The schema is made anew for everybody who asks, and reads nothing of what is asked.
    fill_in(knocker, at(world, route), words[::8] if route.address == "/api/schema" else words)


@pytest.mark.parametrize("route", ADMIN, ids=str)
def test_the_admin_takes_nasty_input(knocker: Knocker, world: World, route: Route) -> None:
    """Django's own pages with our columns: a taste of each."""
    fill_in(knocker, at(world, route, **ADMIN_VALUES), ("a\0b", "' OR 1=1 --", "9" * 5000))


@pytest.mark.slow
@pytest.mark.parametrize("route", ADMIN, ids=str)
def test_the_admin_takes_all_nasty_input(knocker: Knocker, world: World, route: Route) -> None:
    fill_in(knocker, at(world, route, **ADMIN_VALUES), nasty.WORDS)


def fill_in(knocker: Knocker, address: str, words: tuple[str, ...]) -> None:
    """Every query and every form with the same word in all of its fields, and a few words in one field alone."""
    for word in words:
        knocker.knock("GET", f"{address}?{urlencode(dict.fromkeys((*KNOWN_NAMES, *PAGE_NAMES), word))}")
        knocker.form(address, dict.fromkeys(form_names(), word))
    for name in PAGE_NAMES if len(words) > 3 else ("_q", "o"):
        for word in ("a\0b", "9" * 5000):
            knocker.knock("GET", f"{address}?{urlencode({name: word})}")
    for name in ("from", "gpu", "name", "shared"):
        knocker.form(address, {name: "a\0b"})


def form_names() -> list[str]:
    fields = {name for kind in registry.all_kinds().values() for name in kind.Params().fields}
    return sorted(
        fields | {"gpu", "name", "priority", "from", "shared", "key", "next", "username", "password"}
    )


@pytest.mark.parametrize("route", [route for route in OURS if "{" in route.address], ids=str)
def test_pages_take_nasty_addresses(knocker: Knocker, world: World, route: Route) -> None:
    wander(knocker, world, route, nasty.SEGMENTS)


@pytest.mark.parametrize("route", [route for route in ADMIN if "{" in route.address], ids=str)
def test_the_admin_takes_nasty_addresses(knocker: Knocker, world: World, route: Route) -> None:
    wander(knocker, world, route, ("%00", "%ff%fe", "9" * 5000))


def wander(knocker: Knocker, world: World, route: Route, segments: tuple[str, ...]) -> None:
    for name in [name for name in world.values() | ADMIN_VALUES if f"{{{name}}}" in route.address]:
        for segment in segments:
            address = at(world, route, **ADMIN_VALUES | {name: segment})
            knocker.knock("GET", address)
            knocker.form(address, {})


def test_no_header_does_harm(knocker: Knocker) -> None:
    for word in (*nasty.TEXTS, "9" * 5000):
        value = quote(word, safe=" ;,=/*")
        for header in (
            "ACCEPT",
            "AUTHORIZATION",
            "COOKIE",
            "ACCEPT_LANGUAGE",
            "HX_CURRENT_URL",
            "X_CSRFTOKEN",
        ):
            knocker.knock("GET", "/api/v1/jobs/", **{f"HTTP_{header}": value})
        for scheme in ("Token", "Bearer"):
            knocker.knock("GET", "/api/v1/jobs/", HTTP_AUTHORIZATION=f"{scheme} {value}")


# What only PostgreSQL says: SQLite stores texts of any length, and NUL ------------------------------------


def test_a_retry_begins_at_a_known_place(knocker: Knocker, world: World) -> None:
    knocker.knock("GET", "/jobs/")
    knocker.client.post(f"/jobs/{world.job.pk}/retry/", {"from": "somewhere else"})
    assert Job.objects.count() == 1


def test_a_name_too_long_to_sign_in_with_is_not_kept(knocker: Knocker) -> None:
    answer = Client().post("/signin/", {"username": "x" * 5000, "password": "x"})
    assert (answer.status_code, AccessAttempt.objects.count()) == (200, 0)
    assert knocker.knock("GET", "/signin/").status_code == 200


@pytest.mark.parametrize("address", ["/jobs/", "/jobs/rows/"])
def test_a_filter_never_reaches_the_database_with_a_nul(knocker: Knocker, address: str) -> None:
    for name in ("status", "kind"):
        page = knocker.knock("GET", f"{address}?{name}=fail%00ed")
        assert b"\0" not in page.content
