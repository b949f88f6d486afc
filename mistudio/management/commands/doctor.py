"""`manage.py doctor`: looks at everything that miStudio needs on this host, and says what repairs what is wrong."""

from __future__ import annotations

import logging
from typing import Any

from django.core.management.base import BaseCommand

from mistudio import doctor


class Command(BaseCommand):
    help = (
        "Explain driver, cards, PyTorch, database, broker, disk and processes of this host. Changes nothing."
    )
    requires_system_checks = []  # what is wrong is to be told, not to keep it from being told

    def handle(self, *args: Any, **options: Any) -> None:
        logging.getLogger("gpus").setLevel(logging.CRITICAL)  # what its readers meet is told here
        count = 0
        for title, part in doctor.parts().items():
            self.stdout.write(f"\n{title}")
            for finding in doctor.look(part):
                count += finding.word == "wrong"
                self.tell(finding)
        self.stdout.write(f"\n{'Nothing is wrong.' if not count else f'{count} wrong, see above.'}")
        if count:
            raise SystemExit(1)

    def tell(self, finding: doctor.Finding) -> None:
        style = {"ok": self.style.SUCCESS, "note": self.style.WARNING, "wrong": self.style.ERROR}[
            finding.word
        ]
        self.stdout.write(f"  {style(f'{finding.word:6}')} {finding.says}")
        if finding.repair:
            self.stdout.write(f"         → {finding.repair}")
