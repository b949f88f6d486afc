"""Pages and REST through Django, `/ws/` through the monitor's sockets; served by daphne."""

from __future__ import annotations

import os

from channels.routing import ProtocolTypeRouter
from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "mistudio.settings")
pages = get_asgi_application()  # before anything that imports models

from monitor.routing import websockets  # noqa: E402

application = ProtocolTypeRouter({"http": pages, "websocket": websockets})
