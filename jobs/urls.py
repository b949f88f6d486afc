"""Routes below `/api/v1/`, each with and without its trailing slash."""

from django.urls import re_path

from jobs import api, registry, system_api, uploads

ID = r"(?P<id>[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12})"
JOB, GROUP, TEMPLATE, ARTIFACT = (rf"^{name}/{ID}" for name in ("jobs", "groups", "templates", "artifacts"))

urlpatterns = [
    re_path(r"^job-kinds/?$", api.KindList.as_view()),
    re_path(r"^job-kinds/(?P<kind>[a-z_]+)/?$", api.KindDetail.as_view()),
    re_path(r"^system/gpu-fit/?$", api.GpuFit.as_view()),
    re_path(r"^system/watchdog-events/?$", system_api.WatchdogEvents.as_view()),
    re_path(r"^jobs/?$", api.JobList.as_view()),
    re_path(JOB + r"/?$", api.JobDetail.as_view()),
    *(
        re_path(JOB + rf"/{name}/?$", api.Verb.as_view(name=name))
        for name in ("cancel", "hold", "release", "pause", "finalize")
    ),
    re_path(JOB + r"/resume/?$", api.Resume.as_view()),
    re_path(JOB + r"/retry/?$", api.Retry.as_view()),
    re_path(JOB + r"/log/?$", api.JobLog.as_view()),
    re_path(JOB + r"/metrics/?$", api.JobMetrics.as_view()),
    re_path(JOB + r"/metrics\.csv/?$", api.JobMetricsCsv.as_view()),
    re_path(JOB + r"/result/?$", api.JobResult.as_view()),
    re_path(JOB + r"/attempts/?$", api.JobAttempts.as_view()),
    re_path(JOB + r"/events/?$", api.JobEvents.as_view()),
    re_path(JOB + r"/files/?$", api.JobFiles.as_view()),
    re_path(JOB + r"/files/(?P<path>.+)$", api.JobFile.as_view()),
    *(
        re_path(rf"^jobs/{name}/?$", api.submit_view(name, kind).as_view())
        for name, kind in registry.all_kinds().items()
    ),
    re_path(r"^jobs/(?P<kind>[a-z_]+)/?$", api.UnknownKind.as_view()),
    re_path(GROUP + r"/?$", api.OneGroup.as_view()),
    re_path(GROUP + r"/cancel/?$", api.GroupCancel.as_view()),
    re_path(r"^templates/?$", api.Templates.as_view()),
    re_path(TEMPLATE + r"/?$", api.TemplateDetail.as_view()),
    re_path(r"^artifacts/?$", uploads.Artifacts.as_view()),
    re_path(ARTIFACT + r"/?$", api.ArtifactDetail.as_view()),
    re_path(ARTIFACT + r"/files/?$", api.ArtifactFiles.as_view()),
    re_path(ARTIFACT + r"/files/(?P<path>.+)$", api.ArtifactFile.as_view()),
]
