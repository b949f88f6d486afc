"""How the pages write numbers, cards and states. A value that nobody knows is a dash, never 0.

`static/js/live.js` writes the same numbers in the same way when frames arrive.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from django import template
from django.http import HttpRequest
from django.urls import NoReverseMatch, reverse
from django.utils import timezone
from django.utils.dateparse import parse_datetime
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from gpus.models import Maintenance
from gpus.timing import sample_seconds as seconds_between_samples

register = template.Library()

DASH = "–"
NOTHING: tuple[Any, ...] = (None, "")
THIN = "\u202f"  # narrow no-break space between thousands
GIB = 2**30
COLOURS = 6  # --s1 … --s6; from the seventh card on, dashed
#: State of a job or health of a card → how its badge looks. What is missing here is grey.
TONES = {
    "running": "busy",
    "starting": "busy",
    "succeeded": "good",
    "failed": "bad",
    "refused": "bad",
    "held": "warn",
    "paused": "warn",
    "lost": "bad",
    "host_lost": "bad",
    "quarantined": "bad",
    "removed": "bad",
    "stale": "warn",
    "draining": "warn",
    "disabled": "warn",
}


SHORT = {word.lower(): word for word in ("FVU", "L0", "CE", "SAE", "BOS", "CPU", "UUID", "AuxK", "ID", "KL")}


# Numbers ------------------------------------------------------------------------------------------------
# A key that a reading lacks arrives as "", which says as little as None.
@register.filter
def whole(value: Any) -> str:
    """93.4 → 93; 10200 → 10 200."""
    return DASH if value in NOTHING else f"{round(value):,}".replace(",", THIN)


@register.filter
def gib(value: Any) -> str:
    """Bytes as GiB without the unit."""
    return DASH if value in NOTHING else f"{value / GIB:.1f}"


@register.filter
def size(value: Any) -> str:
    """Bytes with the unit that fits."""
    if value in NOTHING:
        return DASH
    amount = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


@register.filter
def gibs(value: Any) -> str:
    """Bytes as whole GiB without the unit."""
    return whole(None if value in NOTHING else value / GIB)


@register.filter
def rate(value: Any) -> str:
    return DASH if value in NOTHING else f"{size(value)}/s"


@register.filter
def duration(seconds: Any) -> str:
    """42 s, 38 min, 1 h 12 min, 2 d 3 h."""
    if seconds in NOTHING:
        return DASH
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{round(total / 60)} min"
    if total < 86400:
        return f"{total // 3600} h {total % 3600 // 60} min"
    return f"{total // 86400} d {total % 86400 // 3600} h"


@register.filter
def percent(fraction: Any) -> str:
    return DASH if fraction in NOTHING else f"{100 * fraction:.0f} %"


@register.filter
def number(value: Any) -> str:
    """A number of a result: whole ones grouped, others to four figures; anything else as it is."""
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}".replace(",", THIN)
    if isinstance(value, float):
        return f"{value:,.0f}".replace(",", THIN) if abs(value) >= 10000 else f"{value:.4g}"
    return str(value)


@register.filter
def parameter(value: Any) -> str:
    """A parameter as people write it: sites by block, lists with commas, numbers grouped."""
    if isinstance(value, Mapping):
        if set(value) == {"block", "site"}:
            return f"{value['site']} {value['block']}"
        return ", ".join(f"{worded(key)} {parameter(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(parameter(item) for item in value) or DASH
    if value == "":
        return DASH
    return number(value)


@register.filter
def worded(name: str) -> str:
    """`ce_recovered` → `CE recovered`; names of dimensions stay as the papers write them."""
    if str(name).startswith("d_"):
        return str(name)
    return " ".join(SHORT.get(word, word) for word in str(name).split("_"))


@register.filter
def listed(values: Iterable[str] | None) -> str:
    """Words of a list that a card says; "none" where it says an empty one."""
    return DASH if values is None else ", ".join(values).replace("_", " ") or "none"


# Time ---------------------------------------------------------------------------------------------------
def moment(value: datetime | str | None) -> datetime | None:
    return parse_datetime(value) if isinstance(value, str) else value


@register.filter
def when(value: datetime | str | None) -> str:
    """A `<time>`; live.js writes it in the reader's own time zone."""
    at = moment(value)
    if at is None:
        return DASH
    return format_html('<time datetime="{}">{} UTC</time>', at.isoformat(), at.strftime("%d %b %H:%M:%S"))


@register.filter
def ago(value: datetime | str | None) -> str:
    at = moment(value)
    return DASH if at is None else f"{duration(max(0.0, (timezone.now() - at).total_seconds()))} ago"


@register.filter
def since(value: datetime | str | None) -> str:
    """How long it lasts already, without "ago"."""
    return ago(value).removesuffix(" ago")


# Cards --------------------------------------------------------------------------------------------------
@register.filter
def colour(index: int) -> str:
    """Colour class of the card at this place of the list."""
    return f"s{index % COLOURS + 1}{' dash' if index >= COLOURS else ''}"


@register.filter
def short_name(name: str) -> str:
    """The name without its maker: the rows are narrow, the title has it whole."""
    return name.removeprefix("NVIDIA ").removeprefix("GeForce ")


@register.filter
def short_uuid(uuid: str) -> str:
    return f"{uuid.split('-', 1)[0]}-…{uuid[-4:]}"


@register.filter
def short_id(value: Any) -> str:
    return str(value).replace("-", "")[-6:]


@register.simple_tag(takes_context=True)
def chip(context: template.Context, uuid: str, link_name: bool = False) -> SafeString:
    """The number of a card on its colour, a link to its page; a card that nobody knows keeps its short UUID."""
    gpu = (context.get("gpus") or {}).get(uuid)
    if gpu is None:
        return format_html('<code title="{}">{}</code>', uuid, short_uuid(uuid))
    href = reverse("card", args=[uuid])
    name = format_html(' <a href="{}">{}</a>', href, gpu.name) if link_name else ""
    return format_html(
        '<a class="chip {}" href="{}" title="{} · {}" aria-label="Card {}">{}</a>{}',
        colour(gpu.index),
        href,
        gpu.name,
        uuid,
        gpu.index,
        gpu.index,
        name,
    )


@register.simple_tag(takes_context=True)
def chips(context: template.Context, uuids: Iterable[str], link_name: bool = False) -> SafeString:
    return format_html_join(" ", "{}", ((chip(context, uuid, link_name),) for uuid in uuids or ()))


@register.simple_tag(takes_context=True)
def asked_for(context: template.Context, request: str, with_name: bool = False) -> SafeString:
    """What stands in `gpu_request` or `gpu_wanted`: auto, or the cards."""
    if not request or request.startswith("auto"):
        return format_html("{}", request or DASH)
    return chips(context, request.split(","), with_name)


# States -------------------------------------------------------------------------------------------------
@register.filter
def badge(word: str) -> SafeString:
    return format_html('<span class="badge {}">{}</span>', TONES.get(word, ""), worded(word))


@register.simple_tag
def sample_seconds() -> str:
    return f"{seconds_between_samples():g}"


@register.filter
def kind_label(name: str) -> str:
    """The kind's label; the bare name for kinds that this version does not have any more."""
    from jobs import registry

    return registry.get(name).label if name in registry.names() else name


@register.filter
def process_name(process: Mapping[str, Any]) -> str:
    """Our processes carry their job's id in their title; the page links it instead."""
    return (process["name"] or DASH).replace(str(process["job_id"]), "").strip()


@register.filter
def stage(name: str) -> str:
    return "SAEs" if name == "saes" else name.capitalize()


@register.filter
def took(job: Any) -> float | None:
    if job.started_at is None or job.finished_at is None:
        return None
    return (job.finished_at - job.started_at).total_seconds()


# The frame of every page --------------------------------------------------------------------------------
PAGES = (
    ("Monitor", "monitor"),
    ("Jobs", "jobs"),
    ("Artifacts", "artifacts"),
    ("New job", "new"),
    ("Health", "health-page"),
    ("Tokens", "token-page"),
    ("API", "docs"),
    ("Admin", "admin:index"),
)


@register.filter
def pages(request: HttpRequest) -> list[dict[str, Any]]:
    """The links of the top bar: only those that exist, Admin only for staff."""
    links = []
    for label, name in PAGES:
        if name.startswith("admin") and not request.user.is_staff:
            continue
        try:
            url = reverse(name)
        except NoReverseMatch:
            continue
        here = request.path == url if url == "/" else request.path.startswith(url)
        links.append({"label": label, "url": url, "here": here})
    return links


@register.inclusion_tag("_strip.html")
def strip() -> Mapping[str, Any]:
    """All cards in one line, as the database knows them; frames keep it up to date."""
    from monitor.board import aggregate

    return {"aggregate": aggregate()}


@register.inclusion_tag("_maintenance.html")
def maintenance() -> Mapping[str, Any]:
    """What keeps jobs from starting, said on every page."""
    return {"maintenances": Maintenance.in_force()}


@register.filter
def ticks(text: str) -> SafeString:
    """`words` between backticks as code."""
    parts = str(text).split("`")
    pieces = (("code" if number % 2 else "span", part) for number, part in enumerate(parts))
    return format_html_join("", "<{0}>{1}</{0}>", pieces)
