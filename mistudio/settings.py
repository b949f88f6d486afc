"""All settings of miStudio; every value of the environment is read here, through `env.py`.

The list of variables with their meaning stands in `docs/settings.md`.
"""

from __future__ import annotations

import os
import socket
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import dj_database_url
import django_stubs_ext
from csp.constants import NONE, SELF
from django.core.exceptions import ImproperlyConfigured

from mistudio import env, home

django_stubs_ext.monkeypatch()  # `ModelAdmin[Job]` also at run time

BASE_DIR = Path(__file__).resolve().parent.parent

# Where everything lives -------------------------------------------------------------------------------
MISTUDIO_HOME = env.folder("MISTUDIO_HOME", BASE_DIR / "var")
home.prepare(MISTUDIO_HOME)
REMEMBERED = home.remembered(MISTUDIO_HOME)
MISTUDIO_SOCKETS = home.socket_folder(MISTUDIO_HOME)

# Cards ------------------------------------------------------------------------------------------------
MISTUDIO_HOST_NAME = env.text("MISTUDIO_HOST_NAME", socket.gethostname().split(".")[0])
MISTUDIO_GPU_BACKEND = env.choice(
    "MISTUDIO_GPU_BACKEND", ("auto", "nvml", "simulated"), REMEMBERED.get("gpu_backend", "auto")
)
MISTUDIO_SIMULATED_GPUS = env.sizes("MISTUDIO_SIMULATED_GPUS") or REMEMBERED.get("simulated_gpus", [])
#: None: all. CUDA's own list counts for real cards only, and an empty list means none.
MISTUDIO_VISIBLE_GPUS = env.words("MISTUDIO_VISIBLE_GPUS")
if MISTUDIO_VISIBLE_GPUS is None and MISTUDIO_GPU_BACKEND != "simulated":
    MISTUDIO_VISIBLE_GPUS = env.words("CUDA_VISIBLE_DEVICES")
MISTUDIO_TORCH_DEVICE = env.choice("MISTUDIO_TORCH_DEVICE", ("cuda", "cpu"), "cuda")
MISTUDIO_TIME_SCALE = env.number("MISTUDIO_TIME_SCALE", 1.0, minimum=0.01)
MISTUDIO_SAMPLE_SECONDS = env.number("MISTUDIO_SAMPLE_SECONDS", 2.0, minimum=0.2)

# Jobs -------------------------------------------------------------------------------------------------
REDIS_URL = env.text("REDIS_URL") or home.broker_url(MISTUDIO_HOME)
MISTUDIO_ALLOW_CPU = env.boolean("MISTUDIO_ALLOW_CPU", default="REDIS_URL" not in os.environ)
MISTUDIO_CPU_JOBS = env.integer("MISTUDIO_CPU_JOBS", 2, minimum=1)
#: What one user who is not staff may have at once; unset: no limit.
MISTUDIO_USER_RUNNING_JOBS = env.limit("MISTUDIO_USER_RUNNING_JOBS")
MISTUDIO_USER_QUEUED_JOBS = env.limit("MISTUDIO_USER_QUEUED_JOBS")
MISTUDIO_JOB_START = env.choice("MISTUDIO_JOB_START", ("fork", "spawn"), "fork")
#: Folders with kinds of one's own, one file per kind, beside those in `jobs/kinds/`.
MISTUDIO_KIND_PATHS = env.paths("MISTUDIO_KIND_PATHS", [])
MISTUDIO_FENCE_SECONDS = env.number("MISTUDIO_FENCE_SECONDS", 600.0)
MISTUDIO_WATCHDOG = env.choice("MISTUDIO_WATCHDOG", ("clean", "report"), "clean")
MISTUDIO_WATCHDOG_GRACE_SECONDS = env.number("MISTUDIO_WATCHDOG_GRACE_SECONDS", 120.0)
#: Whether downloads of users without a token of their own use the host's (`HF_TOKEN`, `hf auth login`).
MISTUDIO_SHARE_HF_TOKEN = env.boolean("MISTUDIO_SHARE_HF_TOKEN", default=False)
HF_HOME = env.folder("HF_HOME", Path.home() / ".cache" / "huggingface")
MISTUDIO_IMPORT_ROOTS = env.paths("MISTUDIO_IMPORT_ROOTS", [HF_HOME / "hub", MISTUDIO_HOME / "import"])
if any(root == MISTUDIO_HOME or root in MISTUDIO_HOME.parents for root in MISTUDIO_IMPORT_ROOTS):
    raise ImproperlyConfigured("MISTUDIO_IMPORT_ROOTS may not contain the data folder itself.")


# Web --------------------------------------------------------------------------------------------------
MISTUDIO_BIND = env.text("MISTUDIO_BIND", "127.0.0.1")
MISTUDIO_PUBLIC_URL = env.text("MISTUDIO_PUBLIC_URL")
MISTUDIO_TLS = env.boolean("MISTUDIO_TLS", default=False)
SECRET_KEY = env.text("MISTUDIO_SECRET_KEY") or home.secret_key(MISTUDIO_HOME)
DEBUG = env.boolean("MISTUDIO_DEBUG", default=False)
ALLOWED_HOSTS = ["localhost", "127.0.0.1", "[::1]", MISTUDIO_BIND]
if MISTUDIO_PUBLIC_URL:
    _public = urlsplit(MISTUDIO_PUBLIC_URL)
    if _public.scheme not in ("http", "https") or not _public.hostname:
        raise ImproperlyConfigured(
            f"MISTUDIO_PUBLIC_URL={MISTUDIO_PUBLIC_URL!r}: expected https://host[:port]."
        )
    ALLOWED_HOSTS.append(_public.hostname)
    CSRF_TRUSTED_ORIGINS = [f"{_public.scheme}://{_public.netloc}"]

# Messages to people ----------------------------------------------------------------------------------
MISTUDIO_WEBHOOK_URL = env.url("MISTUDIO_WEBHOOK_URL", ("http", "https"), "https://host[:port]/path")
MISTUDIO_WEBHOOK_SECRET = env.text("MISTUDIO_WEBHOOK_SECRET")
MISTUDIO_EMAIL_URL = env.url(
    "MISTUDIO_EMAIL_URL",
    ("smtp", "smtp+tls", "smtps"),
    "smtp://, smtp+tls:// or smtps:// and [user:password@]host[:port]",
)
MISTUDIO_EMAIL_FROM = env.text("MISTUDIO_EMAIL_FROM")
if MISTUDIO_EMAIL_URL and "@" not in MISTUDIO_EMAIL_FROM:
    raise ImproperlyConfigured("MISTUDIO_EMAIL_FROM: expected the address that mails come from.")

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "whitenoise.runserver_nostatic",
    "django.contrib.staticfiles",
    "rest_framework",
    "knox",
    "django_filters",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "django_celery_beat",
    "django_htmx",
    "csp",
    "axes",
    "gpus",
    "jobs",
    "monitor",
    "mistudio",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
    "csp.middleware.CSPMiddleware",
    "monitor.visits.noted",
    "axes.middleware.AxesMiddleware",
]
ROOT_URLCONF = "mistudio.urls"
ASGI_APPLICATION = "mistudio.asgi.application"
APPEND_SLASH = False
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
LANGUAGE_CODE, TIME_ZONE, USE_I18N, USE_TZ = "en-us", "UTC", False, True
STATIC_URL = "static/"
STATIC_ROOT = MISTUDIO_HOME / "run" / "static"
VENDOR_DIR = BASE_DIR / ".vendor"
#: plotly's script as its Python package carries it; found here, imported by nobody but the figures.
PLOTLY_DIR = Path(find_spec("plotly").origin or "").parent / "package_data"  # type: ignore[union-attr]
STATICFILES_DIRS = [
    BASE_DIR / "static",
    *([("vendor", VENDOR_DIR)] if VENDOR_DIR.is_dir() else []),
    ("vendor/plotly", PLOTLY_DIR),
]
WHITENOISE_USE_FINDERS = True

# Security ---------------------------------------------------------------------------------------------
AUTHENTICATION_BACKENDS = ["axes.backends.AxesStandaloneBackend", "django.contrib.auth.backends.ModelBackend"]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"django.contrib.auth.password_validation.{name}"}
    for name in ("MinimumLengthValidator", "CommonPasswordValidator", "NumericPasswordValidator")
]
LOGIN_URL, LOGIN_REDIRECT_URL, LOGOUT_REDIRECT_URL = "/signin/", "/", "/signin/"
AXES_FAILURE_LIMIT, AXES_COOLOFF_TIME, AXES_LOCKOUT_PARAMETERS = 8, 0.25, [["username", "ip_address"]]
AXES_RESET_ON_SUCCESS, AXES_VERBOSE = True, False
AXES_LOCKOUT_TEMPLATE = "registration/locked.html"
SESSION_COOKIE_HTTPONLY, SESSION_COOKIE_SAMESITE, CSRF_COOKIE_SAMESITE = True, "Lax", "Lax"
SECURE_CONTENT_TYPE_NOSNIFF, X_FRAME_OPTIONS, SECURE_REFERRER_POLICY = True, "DENY", "same-origin"
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = SECURE_SSL_REDIRECT = MISTUDIO_TLS
SECURE_HSTS_SECONDS, SECURE_HSTS_INCLUDE_SUBDOMAINS, SECURE_HSTS_PRELOAD = (
    31536000 * MISTUDIO_TLS,
    MISTUDIO_TLS,
    MISTUDIO_TLS,
)
if MISTUDIO_TLS:
    SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
CONTENT_SECURITY_POLICY = {
    "DIRECTIVES": {
        "default-src": [SELF],
        "script-src": [SELF],
        # uPlot and plotly place their parts by inline style attributes; scripts stay strict.
        "style-src": [SELF, "'unsafe-inline'"],
        "img-src": [SELF, "data:", "blob:"],
        "connect-src": [SELF],
        "frame-ancestors": [NONE],
        "form-action": [SELF],
        "base-uri": [SELF],
    }
}

# Database ---------------------------------------------------------------------------------------------
#: FULL: a granted job survives a power cut. The agent's readings need not (`manage.py agent` sets NORMAL).
SQLITE_SYNCHRONOUS = env.choice("MISTUDIO_SQLITE_SYNCHRONOUS", ("FULL", "NORMAL"), "FULL")
DATABASES = {
    "default": dj_database_url.parse(
        env.text("DATABASE_URL") or f"sqlite:///{MISTUDIO_HOME / 'db.sqlite3'}", conn_health_checks=True
    )
}
if DATABASES["default"]["ENGINE"].endswith("postgresql"):
    # A cut network answers nothing: after 20 s of silence the database is away, and what waits for it says so.
    DATABASES["default"]["OPTIONS"] = {
        "connect_timeout": 5,
        "tcp_user_timeout": 20_000,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 2,
    } | dict(DATABASES["default"].get("OPTIONS", {}))
if DATABASES["default"]["ENGINE"].endswith("sqlite3"):
    DATABASES["default"]["OPTIONS"] = {
        # A deferred transaction that reads, then writes, fails at once with "database is locked".
        "transaction_mode": "IMMEDIATE",
        "timeout": 20,
        "init_command": f"PRAGMA journal_mode=WAL; PRAGMA synchronous={SQLITE_SYNCHRONOUS}; PRAGMA foreign_keys=ON;",
    }
    DATABASES["default"]["TEST"] = {"NAME": MISTUDIO_HOME / "test.sqlite3"}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# Celery rings the bell; the job table is the queue's durable copy (docs/adr/0001) ----------------------
CELERY_BROKER_URL = home.celery_url(REDIS_URL)
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_SERIALIZER, CELERY_ACCEPT_CONTENT = "json", ["json"]
CELERY_TIMEZONE, CELERY_ENABLE_UTC = "UTC", True
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_WORKER_SEND_TASK_EVENTS = False
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_CONNECTION_MAX_RETRIES = None
CELERY_TASK_PUBLISH_RETRY = False  # a bell that cannot ring now is rung by the next tick
CELERY_BROKER_TRANSPORT_OPTIONS = {
    "visibility_timeout": 60,  # doorbells end in 2 s; a second delivery finds nothing to do
    "unacked_restore_interval": 5,
    "unacked_restore_throttle": 1,
    "socket_keepalive": True,
    "health_check_interval": 25,
    "socket_connect_timeout": 1,
    "socket_timeout": 30,
    "max_retries": 0,  # of a publisher's connection, which else sleeps for 6 s inside a submit
}
CELERY_VISIBILITY_TIMEOUT = 60
CELERY_BEAT_SCHEDULER = "mistudio.beat:Scheduler"
CELERY_BEAT_MAX_LOOP_INTERVAL = max(0.2, 2 * MISTUDIO_TIME_SCALE)
DJANGO_CELERY_BEAT_TZ_AWARE = True

# Channels ---------------------------------------------------------------------------------------------
# The pub/sub layer: redis-py 8 closes the core layer's blocking reads, and idle sockets with them, after 5 s.
CHANNEL_LAYERS = {
    "default": {
        "BACKEND": "channels_redis.pubsub.RedisPubSubChannelLayer",
        "CONFIG": {"hosts": [REDIS_URL], "prefix": "mistudio"},
    }
}

# REST -------------------------------------------------------------------------------------------------
REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "monitor.access.TokenAuthentication",
        "monitor.access.BearerAuthentication",
        "monitor.access.SessionAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["rest_framework.permissions.IsAuthenticated", "gpus.rest.HasScope"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["gpus.rest.StrictJSONParser"],
    "DEFAULT_PAGINATION_CLASS": "gpus.rest.Pages",
    "DEFAULT_FILTER_BACKENDS": ["django_filters.rest_framework.DjangoFilterBackend"],
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    "EXCEPTION_HANDLER": "gpus.rest.envelope",
    "UNAUTHENTICATED_USER": "django.contrib.auth.models.AnonymousUser",
    "TEST_REQUEST_DEFAULT_FORMAT": "json",
}
REST_KNOX = {"TOKEN_TTL": None, "AUTO_REFRESH": False}
KNOX_TOKEN_MODEL = "monitor.ApiToken"
SPECTACULAR_SETTINGS = {
    "TITLE": "miStudio",
    "VERSION": "1",
    "DESCRIPTION": "Cards, jobs and artifacts of mechanistic interpretability.",
    "SCHEMA_PATH_PREFIX": "/api/v1",
    "SERVE_INCLUDE_SCHEMA": False,
    "SWAGGER_UI_DIST": "SIDECAR",
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
    "REDOC_DIST": "SIDECAR",
}
DATA_UPLOAD_MAX_MEMORY_SIZE = 2_621_440

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "{asctime} {levelname:.1} {name}: {message}", "style": "{"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["console"], "level": env.text("MISTUDIO_LOG_LEVEL", "INFO")},
    # Each request of an agent brings a transport of its own, and the SDK tells of its start and end.
    # Addresses of a hub's storage are signed: whoever reads one in a log may fetch what it names.
    "loggers": {"mcp": {"level": "WARNING"}, "httpx2": {"level": "WARNING"}},
}
