from django.apps import AppConfig


class JobsConfig(AppConfig):
    name = "jobs"
    verbose_name = "Jobs"

    def ready(self) -> None:
        from gpus import health, inventory, owners
        from jobs import checks, messages, ownership, requeue  # noqa: F401 - importing `checks` registers them

        owners.register(ownership.owners_of, ownership.holds)
        inventory.listeners.append(messages.tell_of_cards)
        health.register(requeue.failed_launches)
