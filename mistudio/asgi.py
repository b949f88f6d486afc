"""Pages and REST through Django, `/ws/` through the monitor's sockets; served by daphne."""

from __future__ import annotations

import os
from functools import partialmethod

from channels.routing import ProtocolTypeRouter
from daphne.http_protocol import WebRequest
from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "mistudio.settings")
pages = get_asgi_application()  # before anything that imports models

from monitor.routing import websockets  # noqa: E402

# Twisted reads the fields of every form by itself, before anybody is asked who they are, and takes 12 bytes of memory
# for each of an upload (3.7 GB for 300 MiB: daphne 4.2.3, Twisted 26.10). Nobody uses what it finds.
WebRequest.__init__ = partialmethod(WebRequest.__init__, parsePOSTFormSubmission=False)

application = ProtocolTypeRouter({"http": pages, "websocket": websockets})
