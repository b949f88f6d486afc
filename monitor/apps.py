from django.apps import AppConfig
from django.contrib.auth.signals import user_logged_in
from django.db.models.signals import post_migrate


class MonitorConfig(AppConfig):
    name = "monitor"
    verbose_name = "Monitor"

    def ready(self) -> None:
        from monitor import operator, schema, visits  # noqa: F401 - importing `schema` registers its classes

        post_migrate.connect(operator.after_migrate, sender=self, dispatch_uid="operator")
        user_logged_in.connect(visits.signed_in, dispatch_uid="visits")
