"""Four people at every address: a stranger who is not signed in, another user, the owner, and staff.

`PLACES` says for every address and method who may; an address that is not in it turns the first test red.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

import pytest
from channels.testing import WebsocketCommunicator
from django.contrib.auth.models import User
from django.test import Client

from gpus.rest import SCOPES
from jobs import registry
from jobs.models import Artifact, Job
from mistudio.asgi import application
from monitor import topics
from monitor.routing import websockets
from monitor.signin import BACKEND
from tests.monitor.conftest import token_for
from tests.security.conftest import SECRET, World, browser, undone
from tests.security.routes import Route, routes

pytestmark = pytest.mark.django_db


class Who(Enum):
    """Who may, beside staff; what the others are told."""

    ANYBODY = "without signing in"
    USERS = "everybody who is signed in, and all see the same"
    REDUCED = "everybody who is signed in; others than the owner and staff see nothing private"
    OWNER = "the owner and staff; for others there is no such thing, shared or not"
    SHARED = "the owner, staff, and all once it is shared; else there is no such thing"
    SELF = "the owner alone: for staff, too, there is no such thing"
    STAFF = "staff; the others are told that they may not"


class Place(NamedTuple):
    who: Who
    #: The scope that a token needs; empty: a page, where tokens do not count.
    scope: str = ""


ANYBODY, USERS, REDUCED, OWNER, SHARED, SELF, STAFF = Who
SEED = ("all", "gpu-list", "gpu-info", "gpu-metrics", "gpu-processes")
LOOK = {"GET": Place(USERS, "read")}
PARTS = ("log", "metrics", "metrics.csv", "result", "attempts", "events", "files", "files/{path}")
VERBS = ("cancel", "hold", "release", "pause", "resume", "retry", "finalize")
SEE, PRESS = {"GET": Place(USERS)}, {"POST": Place(OWNER)}

PLACES: dict[str, dict[str, Place]] = {
    # REST: the cards
    **{f"{root}/system/{name}": LOOK for root in ("/api/v1", "") for name in SEED},
    **{f"{root}/system/health": {"GET": Place(ANYBODY, "read")} for root in ("/api/v1", "")},
    "/api/v1/system/events": LOOK,
    "/api/v1/system/gpu-history": LOOK,
    "/api/v1/system/watchdog-events": LOOK,
    "/api/v1/system/gpu-fit": {"POST": Place(USERS, "read")},
    "/api/v1/system/gpus/{uuid}": {"PATCH": Place(STAFF, "admin")},
    # REST: jobs
    "/api/v1/job-kinds": LOOK,
    "/api/v1/job-kinds/{kind}": LOOK,
    **{f"/api/v1/jobs/{kind}": {"POST": Place(USERS, "submit")} for kind in registry.names()},
    "/api/v1/jobs/{kind}": {"POST": Place(USERS, "submit")},
    "/api/v1/jobs": {"GET": Place(REDUCED, "read")},
    "/api/v1/jobs/{id}": {"GET": Place(REDUCED, "read")},
    **{f"/api/v1/jobs/{{id}}/{part}": {"GET": Place(OWNER, "read")} for part in PARTS},
    **{f"/api/v1/jobs/{{id}}/{verb}": {"POST": Place(OWNER, "control")} for verb in VERBS},
    "/api/v1/groups/{id}": {"GET": Place(OWNER, "read")},
    "/api/v1/groups/{id}/cancel": {"POST": Place(OWNER, "control")},
    "/api/v1/templates": {"GET": Place(REDUCED, "read"), "POST": Place(USERS, "submit")},
    "/api/v1/templates/{id}": {"DELETE": Place(OWNER, "control")},
    # REST: artifacts
    "/api/v1/artifacts": {"GET": Place(REDUCED, "read"), "POST": Place(USERS, "submit")},
    "/api/v1/artifacts/{id}": {
        "GET": Place(SHARED, "read"),
        "PATCH": Place(OWNER, "control"),
        "DELETE": Place(OWNER, "control"),
    },
    "/api/v1/artifacts/{id}/files": {"GET": Place(SHARED, "read")},
    "/api/v1/artifacts/{id}/files/{path}": {"GET": Place(SHARED, "read")},
    # REST: what lets people in
    "/api/v1/tokens": {"GET": Place(REDUCED, "read"), "POST": Place(USERS, "control")},
    "/api/v1/tokens/{id}": {"DELETE": Place(SELF, "control")},
    "/api/v1/hub-token": {
        "GET": Place(USERS, "read"),
        "PUT": Place(USERS, "control"),
        "DELETE": Place(USERS, "control"),
    },
    "/api/v1/ws-ticket": {"POST": Place(USERS, "read")},
    "/metrics": LOOK,
    # Pages
    "/api/schema": SEE,
    "/api/docs": SEE,
    "/signin": {"GET": Place(ANYBODY), "POST": Place(ANYBODY)},
    "/signin/link": {"GET": Place(ANYBODY), "POST": Place(ANYBODY)},
    "/signout": {"POST": Place(ANYBODY)},
    "/": {"GET": Place(REDUCED)},
    "/parts": {"GET": Place(REDUCED)},
    "/curves": SEE,
    "/cards/{uuid}": {"GET": Place(REDUCED)},
    "/cards/{uuid}/parts": {"GET": Place(REDUCED)},
    "/cards/{uuid}/change": {"POST": Place(STAFF)},
    "/jobs": {"GET": Place(REDUCED)},
    "/jobs/rows": {"GET": Place(REDUCED)},
    "/jobs/{job_id}": {"GET": Place(REDUCED)},
    "/jobs/{job_id}/parts": {"GET": Place(REDUCED)},
    "/jobs/{job_id}/points": {"GET": Place(OWNER)},
    "/jobs/{job_id}/cancel": PRESS,
    "/jobs/{job_id}/hold": PRESS,
    "/jobs/{job_id}/release": PRESS,
    "/jobs/{job_id}/pause": PRESS,
    "/jobs/{job_id}/resume": PRESS,
    "/jobs/{job_id}/retry": PRESS,
    "/jobs/{job_id}/finalize": PRESS,
    "/jobs/{job_id}/template": PRESS,
    "/jobs/since/dismiss": {"POST": Place(USERS)},
    "/groups/{group_id}": {"GET": Place(OWNER)},
    "/groups/{group_id}/parts": {"GET": Place(OWNER)},
    "/groups/{group_id}/points": {"GET": Place(OWNER)},
    "/groups/{group_id}/cancel": PRESS,
    "/artifacts": {"GET": Place(REDUCED)},
    "/artifacts/{artifact_id}": {"GET": Place(SHARED)},
    "/artifacts/{artifact_id}/change": PRESS,
    "/artifacts/{artifact_id}/delete": PRESS,
    "/health": {"GET": Place(REDUCED)},
    "/health/watchdog": SEE,
    "/me": {"GET": Place(USERS), "POST": Place(USERS)},
    "/me/hub-token": {"POST": Place(USERS)},
    "/me/hub-token/forget": {"POST": Place(USERS)},
    "/tokens": {"GET": Place(REDUCED), "POST": Place(USERS)},
    "/tokens/{id}/revoke": {"POST": Place(SELF)},
    "/new": SEE,
    "/new/{kind_name}": {"GET": Place(USERS), "POST": Place(USERS)},
    "/new/{kind_name}/fit": {"GET": Place(USERS), "POST": Place(USERS)},
    "/new/{kind_name}/template": {"POST": Place(USERS)},
    "/templates/{template_id}/delete": PRESS,
}

#: The channels of contract section 5; `jobs/{id}` and `system/gpu/{id}` are tested one by one.
CHANNELS = {"system/gpus", "system/cpu", "system/memory", "system/disk", "system/network", "jobs"}
#: Django's admin guards its pages itself; they are all tested against people who are not staff.
ADMIN = "/admin"
OURS = [route for route in routes() if not route.address.startswith(ADMIN)]
ASKED = [(route, method, place) for route in OURS for method, place in PLACES.get(route.address, {}).items()]
each = pytest.mark.parametrize(("route", "method", "place"), ASKED, ids=[f"{m} {r}" for r, m, _ in ASKED])


#: Enough for gpu-fit and for a token that may no more than the one that makes it.
BODY = '{"kind": "rehearsal", "scopes": ["control"], "name": "a"}'


@pytest.fixture
def cast(world: World, bob: User, staff: User) -> dict[str, User]:
    """A user to whom nothing belongs, the owner of the world, and staff."""
    return {"stranger": bob, "owner": world.owner, "staff": staff}


def ask(client: Client, world: World, route: Route, method: str, slash: str | None = None) -> Any:
    address = route.at(**world.values(id=world.id_for(route.address)))
    if slash is not None:
        address = address.rstrip("/") + slash
    with undone():
        if route.for_programs:
            return client.generic(method, address, BODY, "application/json")
        return client.get(address) if method == "GET" else client.post(address)


# The table ----------------------------------------------------------------------------------------------


def test_every_address_is_in_the_table() -> None:
    """A new address needs a line in `PLACES`: who may? The tests below then hold it to that."""
    there = {route.address for route in OURS}
    assert there - set(PLACES) == set(), "who may use these?"
    assert set(PLACES) - there == set(), "these are gone"


def test_every_method_is_in_the_table() -> None:
    """Of what is a class; `put` of the sign-in form is its `post`."""
    unsaid = {
        f"{method} {route}"
        for route in OURS
        for method in route.methods
        if method not in PLACES[route.address] and (method, route.address) != ("PUT", "/signin")
    }
    assert unsaid == set()


def test_every_address_for_programs_names_a_scope() -> None:
    without = {str(route) for route, _, place in ASKED if route.for_programs and place.scope not in SCOPES}
    assert without == set()


# People -------------------------------------------------------------------------------------------------


@each
def test_who_is_not_signed_in_gets_nothing(world: World, route: Route, method: str, place: Place) -> None:
    for slash in ("", "/") if route.for_programs and route.slash else (None,):
        answer = ask(browser(None), world, route, method, slash)
        if place.who is ANYBODY:
            assert not turned_away(answer)
        else:
            assert turned_away(answer), answer.status_code
            assert SECRET not in text_of(answer)


def turned_away(answer: Any) -> bool:
    to_signin = answer.status_code == 302 and answer["Location"].startswith("/signin/?next=")
    return answer.status_code in (401, 403) or to_signin


@each
def test_a_stranger_gets_what_is_everybodys(
    world: World, cast: dict[str, User], route: Route, method: str, place: Place
) -> None:
    answer = ask(browser(cast["stranger"]), world, route, method)
    expected = {OWNER: 404, SHARED: 404, SELF: 404, STAFF: 403}.get(place.who)
    if expected:
        assert answer.status_code == expected
    else:
        assert_let_in(answer, route)
    assert SECRET not in text_of(answer)


@each
def test_sharing_shows_and_gives_nothing_else(
    world: World, cast: dict[str, User], route: Route, method: str, place: Place
) -> None:
    Artifact.objects.update(shared=True)
    answer = ask(browser(cast["stranger"]), world, route, method)
    if place.who in (OWNER, SELF):
        assert answer.status_code == 404
    if place.who is SHARED:
        assert answer.status_code == 200


@each
def test_the_owner_gets_all_that_is_theirs(
    world: World, cast: dict[str, User], route: Route, method: str, place: Place
) -> None:
    answer = ask(browser(cast["owner"]), world, route, method)
    if place.who is STAFF:
        assert answer.status_code == 403
    else:
        assert_let_in(answer, route)


@each
def test_staff_gets_all_but_what_is_personal(
    world: World, cast: dict[str, User], route: Route, method: str, place: Place
) -> None:
    answer = ask(browser(cast["staff"]), world, route, method)
    if place.who is SELF:
        assert answer.status_code == 404
    else:
        assert_let_in(answer, route)


def assert_let_in(answer: Any, route: Route) -> None:
    """Not turned away, and it is there; what came of it (400, 409, a page) is another test's."""
    assert not turned_away(answer), answer.status_code
    unknown_kind = route.address == "/api/v1/jobs/{kind}" and answer.status_code in (404, 405)
    assert answer.status_code not in (404, 405) or unknown_kind
    assert answer.status_code < 500 or (answer.status_code == 503 and "health" in route.address)


def text_of(answer: Any) -> str:
    """All that was sent; a stream of a file cannot be read outside of a loop, and is not empty."""
    return SECRET if answer.streaming else answer.content.decode()


def test_the_reduced_form_hides_what_is_private(world: World, cast: dict[str, User]) -> None:
    private = ("params", "result", "error", "hint", "inputs", "artifacts")
    address = f"/api/v1/jobs/{world.job.pk}/"
    stranger, owner = browser(cast["stranger"]), browser(cast["owner"])
    for seen in (stranger.get(address).json(), stranger.get("/api/v1/jobs/").json()["results"][0]):
        assert [seen[name] for name in private] == [None] * len(private)
        assert (seen["owner"], seen["status"], seen["progress"]["message"]) == ("alice", "failed", None)
    assert owner.get(address).json()["params"]["journal"] == SECRET
    assert browser(cast["staff"]).get(address).json()["error"] == SECRET


def test_lists_hold_what_one_may_see(world: World, cast: dict[str, User]) -> None:
    counts = {
        name: [browser(user).get(f"/api/v1/{one}/").json()["count"] for one in ("artifacts", "tokens")]
        for name, user in cast.items()
    }
    assert counts == {"stranger": [0, 0], "owner": [1, 1], "staff": [1, 0]}


@pytest.mark.parametrize("others", ["artifact", "job"])
def test_a_job_takes_no_input_of_somebody_else(world: World, cast: dict[str, User], others: str) -> None:
    """Naming a private thing in a submit must tell no more than asking for it."""
    reference = str(world.artifact.pk) if others == "artifact" else f"job:{world.job.pk}"
    Artifact.objects.filter(pk=world.artifact.pk).update(type="activations")
    body = {**registry.get("sae_training").example, "activations": reference}
    answer = browser(cast["stranger"]).post("/api/v1/jobs/sae_training/", body, "application/json")
    assert (answer.status_code, list(answer.json()["errors"])) == (400, ["activations"])
    assert SECRET not in text_of(answer)
    after = browser(cast["stranger"]).post(
        "/api/v1/jobs/rehearsal/", {"after": [str(world.job.pk)]}, "application/json"
    )
    assert after.status_code == 400
    assert Job.objects.count() == 1


def test_a_name_for_a_request_is_ones_own(world: World, cast: dict[str, User]) -> None:
    """The same idempotency key of two people makes two jobs."""
    body = {"idempotency_key": "again", "steps": 1}
    made = {
        browser(cast[name]).post("/api/v1/jobs/rehearsal/", body, "application/json").json()["id"]
        for name in ("owner", "owner", "stranger")
    }
    assert len(made) == 2


@each
def test_a_strangers_page_presses_nothing(world: World, route: Route, method: str, place: Place) -> None:
    """A session that comes without our own page's CSRF token changes nothing anywhere, even staff's."""
    User.objects.filter(pk=world.owner.pk).update(is_staff=True)
    client = Client(enforce_csrf_checks=True)
    client.force_login(world.owner, backend=BACKEND)
    assert method == "GET" or ask(client, world, route, method).status_code == 403


# The admin ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", [route for route in routes() if route.address.startswith(ADMIN)], ids=str)
def test_the_admin_is_for_staff(world: World, cast: dict[str, User], route: Route) -> None:
    values = dict.fromkeys(("id", "object_id", "content_type_id", "app_label", "url"), "1")
    address = route.at(**world.values(**values))
    if address == "/admin/login/":
        return  # leads to the sign-in page, for everybody
    for user in (None, cast["stranger"], cast["owner"]):
        for method in ("get", "post"):
            answer = getattr(browser(user), method)(address)
            away = answer.status_code == 302 and "/login/" in answer["Location"]
            # Signing out is everybody's.
            assert away or answer.status_code in (401, 403, 404) or address == "/admin/logout/"


# Tokens -------------------------------------------------------------------------------------------------


@each
def test_a_token_opens_what_its_scope_says(world: World, route: Route, method: str, place: Place) -> None:
    """Each scope alone: it opens its own addresses and no other. (Staff's, so that only the scope decides.)"""
    User.objects.filter(pk=world.owner.pk).update(is_staff=True)
    for scope in SCOPES:
        client = Client(
            raise_request_exception=False,
            headers={"authorization": f"Token {token_for(world.owner, scope)}"},
        )
        answer = ask(client, world, route, method)
        if route.for_programs and place.who is not ANYBODY:
            assert (answer.status_code == 403) == (scope != place.scope), (scope, answer.content[:200])
            assert scope != place.scope or answer.status_code != 401
        elif place.who is not ANYBODY and not route.address.startswith("/api/"):
            assert turned_away(answer), "pages are for sessions"


@pytest.mark.parametrize("scheme", ["Token", "Bearer"])
def test_a_token_is_no_more_than_its_user(world: World, cast: dict[str, User], scheme: str) -> None:
    """All scopes of a user who is not staff open nothing that is staff's or another's."""
    value = token_for(cast["stranger"], *SCOPES)
    client = Client(headers={"authorization": f"{scheme} {value}"})
    for route, method, place in ASKED:
        if route.for_programs and place.who in (OWNER, SHARED, SELF, STAFF):
            wanted = 403 if place.who is STAFF else 404
            assert ask(client, world, route, method).status_code == wanted, str(route)


# WebSockets ---------------------------------------------------------------------------------------------


def test_every_channel_is_in_the_table() -> None:
    assert topics.GENERAL == CHANNELS
    assert [str(route.pattern) for route in websockets.routes] == [r"^ws(?:/(?P<channel>.*?))?/?$", ""]


def test_a_job_has_a_channel_for_its_owner_and_staff(world: World, cast: dict[str, User]) -> None:
    name = f"jobs/{world.job.pk}"
    assert topics.resolve(name, cast["owner"]) == topics.resolve(name, cast["staff"]) == name
    for spelled in (name, name.upper().replace("JOBS", "jobs"), f"/{name}/", name.replace("-", "")):
        with pytest.raises(topics.UnknownChannel):
            topics.resolve(spelled, cast["stranger"])


def test_channels_for_all_carry_nothing_private(world: World, cast: dict[str, User]) -> None:
    for name in (*CHANNELS, f"system/gpu/{world.card.uuid}"):
        channel = topics.resolve(name, cast["stranger"])
        assert SECRET not in str(topics.snapshot(channel, cast["stranger"]))


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("path", ["/ws/", "/ws/jobs/", "/ws/system/gpus/", "/ws/?ticket=x", "/elsewhere/"])
async def test_no_socket_opens_without_a_sign_in(path: str) -> None:
    headers = [(b"host", b"testserver"), (b"origin", b"http://testserver")]
    socket = WebsocketCommunicator(application, path, headers)
    accepted, _ = await socket.connect(timeout=5)
    assert not accepted
