"""pip's own wheel, fetched without pip: through the package index that the user's pip settings name.

A Debian Python has no ensurepip, and a copy in the project would grow old; the wheel is small, and its
hash is written here. Reads pip's settings as pip does: indexes, find-links, certificate, proxy, login.

What opens connections is imported where it is used: a set-up with nothing to do needs none of it.
"""

import base64
import configparser
import hashlib
import os
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple
from urllib.parse import unquote, urljoin, urlsplit

PIP_WHEEL = "pip-26.3-py3-none-any.whl"
PIP_SHA256 = "f3b60b20ffaadd4415ed7957212a38ac63fa4c5fa375bd0f4a797777940fad13"

DEFAULT_INDEX = "https://pypi.org/simple"
TIMEOUT_SECONDS = 30


class SetupError(Exception):
    """A sentence for a person: what is in the way, and what to do about it."""


def pip_settings() -> Dict[str, str]:
    """pip's options as pip reads them: files from the general to the particular, then the environment."""
    settings: Dict[str, str] = {}
    for path in pip_files():
        parser = configparser.RawConfigParser()
        parser.read(str(path), encoding="utf-8")
        for section in ("global", "install"):
            if parser.has_section(section):
                settings.update((key.replace("_", "-"), value) for key, value in parser.items(section))
    for name, value in os.environ.items():
        if name.startswith("PIP_") and value:
            settings[name[4:].lower().replace("_", "-")] = value
    return settings


def pip_files() -> List[Path]:
    named = os.environ.get("PIP_CONFIG_FILE")
    if named == os.devnull:
        return []
    home = Path(os.path.expanduser("~"))
    shared = reversed(os.environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":"))
    files = [Path(folder, "pip", "pip.conf") for folder in shared if folder] + [Path("/etc/pip.conf")]
    if not (named and os.path.exists(named)):
        files += [home / ".pip" / "pip.conf"]
        files += [Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config", "pip", "pip.conf")]
    return [*files, *([Path(named)] if named else [])]


def pip_pages(settings: Dict[str, str]) -> List[str]:
    """Where pip's wheel may be listed: folders and pages of find-links, then each index's page for pip."""
    pages = settings.get("find-links", "").split()
    if settings.get("no-index", "").lower() not in ("1", "true", "yes", "on"):
        indexes = [settings.get("index-url", DEFAULT_INDEX), *settings.get("extra-index-url", "").split()]
        pages += [index.rstrip("/") + "/pip/" for index in indexes]
    return pages


class Fetcher:
    """Reads from an index with the certificate, proxy and credentials that pip would use."""

    def __init__(self, settings: Dict[str, str]) -> None:
        self.settings = settings

    def open(self, url: str) -> Any:
        import urllib.request

        plain, login = without_login(url)
        handlers: List[Any] = [urllib.request.HTTPSHandler(context=self.tls(plain))]
        if self.settings.get("proxy"):
            handlers.append(
                urllib.request.ProxyHandler(dict.fromkeys(("http", "https"), self.settings["proxy"]))
            )
        request = urllib.request.Request(
            plain, headers={"User-Agent": "mistudio-setup", "Accept": "text/html, */*"}
        )
        if login:
            request.add_header("Authorization", login)
        return urllib.request.build_opener(*handlers).open(request, timeout=TIMEOUT_SECONDS)

    def tls(self, url: str) -> Any:
        import ssl

        context = ssl.create_default_context(cafile=self.settings.get("cert") or None)
        if urlsplit(url).hostname in self.settings.get("trusted-host", "").split():
            # The user told pip to trust this host; the file itself is checked by its hash.
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context


def without_login(url: str) -> Tuple[str, Optional[str]]:
    """The URL without user and password, and the header that carries them."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url, None
    login, host = parts.netloc.rsplit("@", 1)
    token = base64.b64encode(unquote(login if ":" in login else login + ":").encode()).decode()
    return parts._replace(netloc=host).geturl(), f"Basic {token}"


def links(page: str, text: str) -> Iterator[str]:
    """The addresses on an index page, absolute; the page's login goes along to files of the same host."""
    found: List[str] = []

    class Anchors(HTMLParser):
        def handle_starttag(self, tag: str, attrs: Any) -> None:
            if tag == "a":
                found.extend(value for name, value in attrs if name == "href" and value)

    Anchors().feed(text)
    host = urlsplit(page).netloc
    for href in found:
        parts = urlsplit(urljoin(page, href))
        if parts.netloc == host.rsplit("@", 1)[-1]:
            parts = parts._replace(netloc=host)
        yield parts._replace(fragment="").geturl()


def locate(page: str, fetcher: Fetcher) -> Optional[str]:
    """The address of pip's wheel on one page or in one folder; None when it is not offered there."""
    folder = Path(unquote(urlsplit(page).path) if page.startswith("file://") else page)
    if "://" not in page or page.startswith("file://"):
        for candidate in (folder, folder / "index.html"):
            if candidate.is_file():
                return wheel_among(links(candidate.resolve().as_uri(), candidate.read_text(encoding="utf-8")))
        held = folder / PIP_WHEEL
        return held.resolve().as_uri() if held.is_file() else None
    with fetcher.open(page) as answer:
        return wheel_among(links(page, answer.read().decode("utf-8", "replace")))


def wheel_among(addresses: Iterator[str]) -> Optional[str]:
    return next((url for url in addresses if url.split("?")[0].rsplit("/", 1)[-1] == PIP_WHEEL), None)


def find_pip() -> str:
    """The address of pip's wheel at the first index that offers it. Raises SetupError with every reason."""
    settings = pip_settings()
    reasons = []
    for page in pip_pages(settings):
        try:
            address = locate(page, Fetcher(settings))
        except (OSError, ValueError) as error:
            reasons.append(f"  {without_login(page)[0]}: {getattr(error, 'reason', error)}")
            continue
        if address:
            return address
        reasons.append(f"  {without_login(page)[0]}: does not offer {PIP_WHEEL}")
    raise SetupError(
        "The package index could not be reached, or does not offer pip:\n" + "\n".join(reasons) + "\n"
        "Check the network and the proxy, or name another index (PIP_INDEX_URL, or index-url in pip.conf), "
        "then run the same command again; what is complete is kept."
    )


def pip_wheel(folder: Path) -> Path:
    """pip's wheel in `folder`, fetched unless it is there and right."""
    target = folder / PIP_WHEEL
    if target.is_file() and sha256(target.read_bytes()) == PIP_SHA256:
        return target
    address = find_pip()
    with Fetcher(pip_settings()).open(address) as answer:
        content = answer.read()
    found = sha256(content)
    if found != PIP_SHA256:
        raise SetupError(
            f"{without_login(address)[0]} is not the pip that was meant: its sha256 is {found}, "
            f"expected {PIP_SHA256}.\n"
            "It was not used. Name another index (PIP_INDEX_URL), then run the same command again."
        )
    folder.mkdir(exist_ok=True)
    part = target.with_name(target.name + ".part")
    part.write_bytes(content)
    return part.replace(target)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
