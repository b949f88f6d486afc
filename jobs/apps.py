from django.apps import AppConfig


class JobsConfig(AppConfig):
    name = "jobs"
    verbose_name = "Jobs"

    def ready(self) -> None:
        from gpus import owners
        from jobs import ownership

        owners.register(ownership.owners_of, ownership.holds)
