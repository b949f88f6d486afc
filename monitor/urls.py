"""Addresses of the pages."""

from __future__ import annotations

from django.urls import path, re_path

from monitor import (
    artifact_pages,
    card_pages,
    health_page,
    me_page,
    prometheus,
    token_pages,
    views,
    watchdog_page,
)

#: As in `gpus.urls`: old names of MIG instances have slashes.
UUID = r"(?P<uuid>[A-Za-z0-9-]+(?:/[0-9]+/[0-9]+)?)"

urlpatterns = [
    path("", views.monitor, name="monitor"),
    path("parts/", views.monitor_parts, name="monitor-parts"),
    path("curves/", card_pages.curves_of, name="curves"),
    re_path(rf"^cards/{UUID}/\Z", card_pages.card, name="card"),
    re_path(rf"^cards/{UUID}/parts/\Z", card_pages.card_parts, name="card-parts"),
    re_path(rf"^cards/{UUID}/change/\Z", card_pages.card_change, name="card-change"),
    path("jobs/", views.jobs, name="jobs"),
    path("jobs/rows/", views.job_rows, name="job-rows"),
    path("jobs/<uuid:job_id>/", views.job, name="job"),
    path("jobs/<uuid:job_id>/parts/", views.job_parts, name="job-parts"),
    path("jobs/<uuid:job_id>/points/", views.job_points, name="job-points"),
    path("jobs/<uuid:job_id>/cancel/", views.job_cancel, name="job-cancel"),
    path("jobs/<uuid:job_id>/hold/", views.job_hold, name="job-hold"),
    path("jobs/<uuid:job_id>/release/", views.job_release, name="job-release"),
    path("jobs/<uuid:job_id>/retry/", views.job_retry, name="job-retry"),
    path("artifacts/", artifact_pages.artifacts, name="artifacts"),
    path("artifacts/<uuid:artifact_id>/", artifact_pages.artifact, name="artifact"),
    path("artifacts/<uuid:artifact_id>/change/", artifact_pages.artifact_change, name="artifact-change"),
    path("artifacts/<uuid:artifact_id>/delete/", artifact_pages.artifact_delete, name="artifact-delete"),
    re_path(r"^metrics/?$", prometheus.MetricsView.as_view(), name="prometheus"),
    path("health/", health_page.health, name="health-page"),
    path("health/watchdog/", watchdog_page.watchdog, name="watchdog"),
    path("me/", me_page.me, name="me"),
    path("tokens/", token_pages.tokens, name="token-page"),
    path("tokens/<uuid:id>/revoke/", token_pages.revoke, name="token-revoke"),
    path("new/", views.new, name="new"),
    path("new/<slug:kind_name>/", views.new_kind, name="new-kind"),
    path("new/<slug:kind_name>/fit/", views.new_fit, name="new-fit"),
]
