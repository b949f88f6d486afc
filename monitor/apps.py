from django.apps import AppConfig
from django.db.models.signals import post_migrate


class MonitorConfig(AppConfig):
    name = "monitor"
    verbose_name = "Monitor"

    def ready(self) -> None:
        from monitor import operator, schema  # noqa: F401 - importing `schema` registers its classes

        post_migrate.connect(operator.after_migrate, sender=self, dispatch_uid="operator")
