"""The pages of the Monitor and of jobs. Each view asks another module what to show and renders it."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import User
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_POST, require_safe
from django.views.decorators.vary import vary_on_headers
from django_htmx.middleware import HtmxDetails
from rest_framework.exceptions import ValidationError

from gpus.rest import ApiError, body
from jobs import templates, verbs
from jobs.exceptions import Conflict
from jobs.models import Job
from jobs.serializers import may_see
from monitor import board, figures, joblist, jobpage, since, visits


class Request(HttpRequest):
    """What `login_required` and the middleware hand to a view."""

    user: User
    htmx: HtmxDetails


# Monitor ------------------------------------------------------------------------------------------------
@login_required
@require_safe
def monitor(request: Request) -> HttpResponse:
    return render(request, "monitor/monitor.html", board.monitor(request.user))


@login_required
@require_safe
def monitor_parts(request: Request) -> HttpResponse:
    return render(request, "monitor/_parts.html", board.monitor(request.user))


# Jobs ---------------------------------------------------------------------------------------------------
@login_required
@require_safe
@vary_on_headers("HX-Request")
def jobs(request: Request) -> HttpResponse:
    """The list; for htmx, whose filters changed, its rows alone."""
    context = joblist.page(request.user, request.GET)
    if request.htmx:
        return render(request, "jobs/_rows.html", context)
    return render(request, "jobs/jobs.html", context | {"since": since.context(request.user)})


@login_required
@require_safe
def job_rows(request: Request) -> HttpResponse:
    """The rows alone: of a page of the list, or of the jobs that `ids` names."""
    return render(request, "jobs/_rows.html", joblist.page(request.user, request.GET))


@login_required
@require_POST
def since_dismiss(request: Request) -> HttpResponse:
    """What happened since the last visit was read."""
    visits.dismiss(request.user)
    return redirect("jobs")


# One job ------------------------------------------------------------------------------------------------
def found(job_id: UUID) -> Job:
    return get_object_or_404(Job.objects.select_related("owner", "host", "retry_of"), pk=job_id)


def mine(request: Request, job_id: UUID) -> Job:
    """The job, for its owner and staff; for others as if it did not exist."""
    job = found(job_id)
    if not may_see(job, request.user):
        raise Http404
    return job


@login_required
@require_safe
def job(request: Request, job_id: UUID) -> HttpResponse:
    return render(request, "jobs/job.html", jobpage.context(found(job_id), request.user))


@login_required
@require_safe
def job_parts(request: Request, job_id: UUID) -> HttpResponse:
    return render(request, "jobs/_job.html", jobpage.context(found(job_id), request.user))


@login_required
@require_safe
def job_points(request: Request, job_id: UUID) -> HttpResponse:
    """The metric curves, thinned to what a chart can show."""
    return JsonResponse(figures.points(mine(request, job_id)))


@login_required
@require_POST
def job_cancel(request: Request, job_id: UUID) -> HttpResponse:
    return pressed(request, job_id, verbs.cancel)


@login_required
@require_POST
def job_hold(request: Request, job_id: UUID) -> HttpResponse:
    return pressed(request, job_id, verbs.hold)


@login_required
@require_POST
def job_release(request: Request, job_id: UUID) -> HttpResponse:
    return pressed(request, job_id, verbs.release)


@login_required
@require_POST
def job_pause(request: Request, job_id: UUID) -> HttpResponse:
    return pressed(request, job_id, verbs.pause)


def pressed(request: Request, job_id: UUID, verb: Callable[[Job, User], Job]) -> HttpResponse:
    """Do it, and show the job again; with a sentence where it came too late."""
    wanted = mine(request, job_id)
    try:
        verb(wanted, request.user)
    except Conflict as conflict:
        messages.error(request, str(conflict))
    return redirect("job", job_id)


@login_required
@require_POST
def job_retry(request: Request, job_id: UUID) -> HttpResponse:
    gpu, start = request.POST.get("gpu") or None, request.POST.get("from") or None
    return went_on(request, job_id, lambda job, user: verbs.retry(job, user, gpu=gpu, start=start))


@login_required
@require_POST
def job_resume(request: Request, job_id: UUID) -> HttpResponse:
    gpu = request.POST.get("gpu") or None
    return went_on(request, job_id, lambda job, user: verbs.resume(job, user, gpu=gpu))


@login_required
@require_POST
def job_finalize(request: Request, job_id: UUID) -> HttpResponse:
    return went_on(request, job_id, verbs.finalize)


def went_on(request: Request, job_id: UUID, verb: Callable[[Job, User], Job]) -> HttpResponse:
    """Do it, and show the job that comes of it; or the same one, with the sentence of a refusal."""
    try:
        job_id = verb(mine(request, job_id), request.user).pk
    except (Conflict, ApiError, ValidationError) as refusal:
        messages.error(request, said(refusal))
    return redirect("job", job_id)


def said(refusal: Exception) -> str:
    return str(refusal) if isinstance(refusal, Conflict) else body(refusal)["detail"]


@login_required
@require_POST
def job_template(request: Request, job_id: UUID) -> HttpResponse:
    """Keep the job's parameters under a name."""
    wanted = mine(request, job_id)
    name, shared = request.POST.get("template_name", "").strip(), "template_shared" in request.POST
    try:
        kept = templates.save(request.user, wanted.kind, name, templates.params_of(wanted), shared=shared)
        messages.success(request, f"Kept as the template {kept.name!r}.")
    except (ApiError, ValidationError) as refusal:
        messages.error(request, said(refusal))
    return redirect("job", job_id)
