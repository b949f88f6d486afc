"""The project: wiring only. Importing it makes the Celery application known to `shared_task`."""

from mistudio.celery import app as celery_app

__all__ = ["celery_app"]
