"""The pages of artifacts: the list with its upload, one artifact, and what its owner may do to it."""

from __future__ import annotations

from uuid import UUID

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_http_methods, require_POST, require_safe
from django.views.decorators.vary import vary_on_headers
from rest_framework.exceptions import APIException, ValidationError

from gpus.rest import ApiError, body
from jobs import shelf, uploads
from jobs.artifacts import visible
from jobs.models import Artifact
from jobs.serializers import ArtifactSerializer
from monitor import artifactlist, artifactpage
from monitor.views import Request


# The list -----------------------------------------------------------------------------------------------
@login_required
@require_http_methods(["GET", "HEAD", "POST"])
@vary_on_headers("HX-Request")
def artifacts(request: Request) -> HttpResponse:
    """The list; for htmx, whose filters changed, its rows alone. POST is the upload."""
    if request.method == "POST":
        return uploaded(request)
    template = "artifacts/_rows.html" if request.htmx else "artifacts/artifacts.html"
    return render(request, template, artifactlist.page(request.user, request.GET))


def uploaded(request: Request) -> HttpResponse:
    typed = request.POST.copy()
    typed.update(request.FILES)  # type: ignore[arg-type]  # as DRF joins the two
    try:
        made = uploads.upload(request.user, typed)
    except (ValidationError, ApiError) as refusal:
        told = {"typed": request.POST, "errors": errors_of(refusal)}
        shown = artifactlist.page(request.user, {}) | told
        return render(request, "artifacts/artifacts.html", shown, status=refusal.status_code)
    return redirect("artifact", made.pk)


def errors_of(refusal: APIException) -> dict[str, list[str]]:
    """Sentences by the field of the form that they belong to; what is of no field is about the files."""
    said = body(refusal)
    by_field: dict[str, list[str]] = {}
    for path, sentences in said.get("errors", {"file": [said["detail"]]}).items():
        by_field.setdefault(path.partition(".")[0], []).extend(sentences)
    return by_field


# One artifact -------------------------------------------------------------------------------------------
@login_required
@require_safe
def artifact(request: Request, artifact_id: UUID) -> HttpResponse:
    seen = visible(request.user).select_related("owner", "job")
    shown = get_object_or_404(seen, pk=artifact_id)
    return render(request, "artifacts/artifact.html", artifactpage.context(shown, request.user))


def mine(request: Request, artifact_id: UUID) -> Artifact:
    """The artifact, for its owner and staff; for others as if it did not exist."""
    return get_object_or_404(shelf.changeable(request.user), pk=artifact_id)


@login_required
@require_POST
def artifact_change(request: Request, artifact_id: UUID) -> HttpResponse:
    """Another `name`, or `shared` on or off."""
    changed = ArtifactSerializer(mine(request, artifact_id), data=request.POST, partial=True)
    try:
        changed.is_valid(raise_exception=True)
        shelf.change(changed)
    except ValidationError as refusal:
        messages.error(request, body(refusal)["detail"])
    return redirect("artifact", artifact_id)


@login_required
@require_POST
def artifact_delete(request: Request, artifact_id: UUID) -> HttpResponse:
    gone = mine(request, artifact_id)
    try:
        shelf.delete(gone)
    except ApiError as refusal:
        messages.error(request, str(refusal.detail))
        return redirect("artifact", artifact_id)
    messages.success(request, f"{gone} is deleted.")
    return redirect("artifacts")
