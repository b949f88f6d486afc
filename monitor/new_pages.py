"""The pages that make jobs: the choice of a kind, its form, and the templates that a form begins with."""

from __future__ import annotations

from uuid import UUID

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe
from rest_framework.exceptions import ValidationError

from gpus.rest import ApiError, body
from jobs import groups, submit, templates
from monitor import forms
from monitor.views import Request


@login_required
@require_safe
def new(request: Request) -> HttpResponse:
    return render(request, "new/new.html", {"stages": forms.stages()})


@login_required
def new_kind(request: Request, kind_name: str) -> HttpResponse:
    form = kind_form(request, kind_name)
    if request.method == "POST":
        try:
            return redirect(queued(request, form))
        except (ValidationError, ApiError) as refusal:
            form.refused(refusal)
    return page(request, form)


def queued(request: Request, form: forms.KindForm) -> str:
    """Queue what the form says; the address to go on at: the group's, the job's, or the form of what comes next."""
    data = form.data()
    if groups.swept(form.kind, data):
        return reverse("group", args=[groups.create(request.user, form.name, data)[0].group_id])
    job = submit.submit(request.user, form.name, data)
    return form.then(job) or reverse("job", args=[job.pk])


def page(request: Request, form: forms.KindForm) -> HttpResponse:
    context = {"form": form, "stages": forms.stages(), "place": form.place()}
    return render(request, "new/kind.html", context, status=400 if form.errors else 200)


@login_required
def new_fit(request: Request, kind_name: str) -> HttpResponse:
    """Where the job as typed so far would run: the picker alone."""
    form = kind_form(request, kind_name)
    return render(request, "new/_place.html", {"form": form, "place": form.place()})


@login_required
@require_POST
def save_template(request: Request, kind_name: str) -> HttpResponse:
    """Keep what was typed under a name; the form stays as it is."""
    form, name = kind_form(request, kind_name), request.POST.get("template_name", "").strip()
    try:
        kept = templates.save(
            request.user, kind_name, name, form.parameters(), shared="template_shared" in request.POST
        )
        messages.success(request, f"Kept as the template {kept.name!r}.")
    except (ValidationError, ApiError) as refusal:
        messages.error(request, f"Nothing was kept. {body(refusal)['detail']}")
    return page(request, form)


@login_required
@require_POST
def delete_template(request: Request, template_id: UUID) -> HttpResponse:
    template = get_object_or_404(templates.changeable(request.user), pk=template_id)
    template.delete()
    messages.success(
        request, f"The template {template.name!r} is gone. Jobs that began with it stay as they are."
    )
    return redirect("new-kind", template.kind)


def kind_form(request: Request, kind_name: str) -> forms.KindForm:
    typed = request.POST if request.method == "POST" else request.GET
    try:
        return forms.KindForm(kind_name, request.user, typed, request.build_absolute_uri("/"))
    except KeyError:
        raise Http404(f"There is no kind {kind_name}.") from None
