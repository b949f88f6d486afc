from django.apps import AppConfig


class JobsConfig(AppConfig):
    name = "jobs"
    verbose_name = "Jobs"

    def ready(self) -> None:
        from gpus import inventory, owners
        from jobs import checks, messages, ownership  # noqa: F401 - importing `checks` registers them

        owners.register(ownership.owners_of, ownership.holds)
        inventory.listeners.append(messages.tell_of_cards)
