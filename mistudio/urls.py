"""Addresses: pages at the root, REST under `/api/v1/`, its description under `/api/`, the admin."""

from __future__ import annotations

from django.contrib import admin
from django.contrib.auth.decorators import login_required
from django.urls import include, path
from django.views.generic import RedirectView
from drf_spectacular.views import SpectacularAPIView, SpectacularSwaggerSplitView
from rest_framework.permissions import IsAuthenticated

from monitor.access_urls import api_patterns, signin_patterns

admin.site.site_header = admin.site.site_title = "miStudio"
schema = SpectacularAPIView.as_view(permission_classes=[IsAuthenticated])
# The split view keeps its script out of the page, as our Content-Security-Policy wants it.
docs = login_required(SpectacularSwaggerSplitView.as_view(url_name="schema"))

urlpatterns = [
    path("api/v1/", include("gpus.urls")),
    path("api/v1/", include("jobs.urls")),
    path("api/v1/", include(api_patterns)),
    path("api/schema/", schema, name="schema"),
    path("api/docs/", docs, name="docs"),
    # One sign-in page, so that one lock guards it.
    path("admin/login/", RedirectView.as_view(pattern_name="signin", query_string=True)),
    path("admin/", admin.site.urls),
    path("", include(signin_patterns)),
    path("", include("gpus.aliases")),  # the seed's addresses: /system/all, …
    path("", include("monitor.urls")),
]
handler400 = "monitor.errors.bad_request"
handler404 = "monitor.errors.not_found"
handler500 = "monitor.errors.server_error"
