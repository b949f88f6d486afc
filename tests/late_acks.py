"""Settings for G40: a broker that hands a message out again after 10 s, and tasks acknowledged late."""

from mistudio.settings import *  # noqa: F403
from mistudio.settings import CELERY_BROKER_TRANSPORT_OPTIONS

CELERY_TASK_ACKS_LATE = True
CELERY_VISIBILITY_TIMEOUT = 10
CELERY_BROKER_TRANSPORT_OPTIONS = CELERY_BROKER_TRANSPORT_OPTIONS | {"visibility_timeout": 10}
