"""What the host's Celery worker holds: the client of its fork server. Not imported by other processes."""

from __future__ import annotations

from jobs.forkserver import Client

forkserver = Client()
