"""The pages of groups: a sweep and its jobs, for its owner and staff."""

from __future__ import annotations

from uuid import UUID

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_POST, require_safe

from jobs import groups
from jobs.exceptions import Conflict
from jobs.models import JobGroup
from jobs.serializers import may_see
from monitor import figures, grouppage
from monitor.views import Request


def mine(request: Request, group_id: UUID) -> JobGroup:
    """The group, for its owner and staff; for others as if it did not exist."""
    group = get_object_or_404(JobGroup.objects.select_related("owner"), pk=group_id)
    if not may_see(group, request.user):
        raise Http404
    return group


@login_required
@require_safe
def group(request: Request, group_id: UUID) -> HttpResponse:
    return render(request, "groups/group.html", grouppage.context(mine(request, group_id)))


@login_required
@require_safe
def group_parts(request: Request, group_id: UUID) -> HttpResponse:
    return render(request, "groups/_group.html", grouppage.context(mine(request, group_id)))


@login_required
@require_safe
def group_points(request: Request, group_id: UUID) -> HttpResponse:
    """The curves of one metric, of every job that has it."""
    jobs = groups.members(mine(request, group_id))
    return JsonResponse({"curves": figures.overlaid(jobs, request.GET.get("metric", "").replace("\0", ""))})


@login_required
@require_POST
def group_cancel(request: Request, group_id: UUID) -> HttpResponse:
    try:
        groups.cancel(mine(request, group_id), request.user)
    except Conflict as conflict:
        messages.error(request, str(conflict))
    return redirect("group", group_id)
