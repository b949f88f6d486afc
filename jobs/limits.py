"""What one user may have at once, where the operator set a limit. Staff have none."""

from __future__ import annotations

from django.conf import settings
from django.contrib.auth import get_user_model
from django.db.models import Count

from gpus.rest import ApiError
from jobs.models import ACTIVE, Job, Status
from jobs.people import Person, is_staff
from jobs.waits import Wait

#: What counts as queued: a held job takes up the queue, too.
QUEUED = (Status.QUEUED, Status.HELD)


def busy_users() -> dict[int, int]:
    """Users who run as many jobs as they may, and how many."""
    limit = settings.MISTUDIO_USER_RUNNING_JOBS
    if limit is None:
        return {}
    active = Job.objects.filter(status__in=ACTIVE, owner__is_staff=False).order_by()
    counted = active.values("owner").annotate(running=Count("pk")).filter(running__gte=limit)
    return {row["owner"]: row["running"] for row in counted}


def may_run_another(user: Person) -> bool:
    """Counted under the lock of the user's row, so that two dispatches at once grant no job too many."""
    limit = settings.MISTUDIO_USER_RUNNING_JOBS
    if limit is None or is_staff(user):
        return True
    lock(user)
    return Job.objects.filter(status__in=ACTIVE, owner_id=user.pk).count() < limit


def refuse_too_many(user: Person, adding: int = 1) -> None:
    """429 where so many more would be over the limit of queued jobs. Call it in the transaction that adds them."""
    limit = settings.MISTUDIO_USER_QUEUED_JOBS
    if limit is None or is_staff(user):
        return
    lock(user)
    queued = Job.objects.filter(status__in=QUEUED, owner_id=user.pk).count()
    if queued + adding > limit:
        raise ApiError(
            429,
            "too_many_queued_jobs",
            f"You have {queued} jobs in the queue; this host lets a user have {limit}.",
            queued=queued,
            limit=limit,
            hint="Wait until some have started, or cancel some.",
        )


def lock(user: Person) -> None:
    get_user_model().objects.select_for_update(no_key=True).get(pk=user.pk or 0)


def wait_of(running: int) -> Wait:
    limit = settings.MISTUDIO_USER_RUNNING_JOBS
    return Wait("user_limit", f"its owner runs {running} of at most {limit} jobs at once")
