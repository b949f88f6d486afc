"""Addresses of the pages."""

from __future__ import annotations

from django.urls import path, re_path

from monitor import (
    artifact_pages,
    card_pages,
    group_pages,
    health_page,
    me_page,
    new_pages,
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
    path("jobs/since/dismiss/", views.since_dismiss, name="since-dismiss"),
    path("jobs/rows/", views.job_rows, name="job-rows"),
    path("jobs/<uuid:job_id>/", views.job, name="job"),
    path("jobs/<uuid:job_id>/parts/", views.job_parts, name="job-parts"),
    path("jobs/<uuid:job_id>/points/", views.job_points, name="job-points"),
    path("jobs/<uuid:job_id>/cancel/", views.job_cancel, name="job-cancel"),
    path("jobs/<uuid:job_id>/hold/", views.job_hold, name="job-hold"),
    path("jobs/<uuid:job_id>/release/", views.job_release, name="job-release"),
    path("jobs/<uuid:job_id>/pause/", views.job_pause, name="job-pause"),
    path("jobs/<uuid:job_id>/resume/", views.job_resume, name="job-resume"),
    path("jobs/<uuid:job_id>/retry/", views.job_retry, name="job-retry"),
    path("jobs/<uuid:job_id>/finalize/", views.job_finalize, name="job-finalize"),
    path("jobs/<uuid:job_id>/template/", views.job_template, name="job-template"),
    path("groups/<uuid:group_id>/", group_pages.group, name="group"),
    path("groups/<uuid:group_id>/parts/", group_pages.group_parts, name="group-parts"),
    path("groups/<uuid:group_id>/points/", group_pages.group_points, name="group-points"),
    path("groups/<uuid:group_id>/cancel/", group_pages.group_cancel, name="group-cancel"),
    path("artifacts/", artifact_pages.artifacts, name="artifacts"),
    path("artifacts/<uuid:artifact_id>/", artifact_pages.artifact, name="artifact"),
    path("artifacts/<uuid:artifact_id>/change/", artifact_pages.artifact_change, name="artifact-change"),
    path("artifacts/<uuid:artifact_id>/delete/", artifact_pages.artifact_delete, name="artifact-delete"),
    re_path(r"^metrics/?$", prometheus.MetricsView.as_view(), name="prometheus"),
    path("health/", health_page.health, name="health-page"),
    path("health/watchdog/", watchdog_page.watchdog, name="watchdog"),
    path("me/", me_page.me, name="me"),
    path("me/hub-token/", me_page.set_hub_token, name="hub-token-set"),
    path("me/hub-token/forget/", me_page.forget_hub_token, name="hub-token-forget"),
    path("tokens/", token_pages.tokens, name="token-page"),
    path("tokens/<uuid:id>/revoke/", token_pages.revoke, name="token-revoke"),
    path("new/", new_pages.new, name="new"),
    path("new/<slug:kind_name>/", new_pages.new_kind, name="new-kind"),
    path("new/<slug:kind_name>/fit/", new_pages.new_fit, name="new-fit"),
    path("new/<slug:kind_name>/template/", new_pages.save_template, name="template-save"),
    path("templates/<uuid:template_id>/delete/", new_pages.delete_template, name="template-delete"),
]
