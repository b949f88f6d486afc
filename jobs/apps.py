from django.apps import AppConfig


class JobsConfig(AppConfig):
    name = "jobs"
    verbose_name = "Jobs"

    def ready(self) -> None:
        from gpus import health, owners
        from jobs import ownership, requeue

        owners.register(ownership.owners_of, ownership.holds)
        health.register(requeue.failed_launches)
