"""The environment of the unit tests, set before Django reads its settings (pytest's `-p tests.environment`)."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

HOME = tempfile.mkdtemp(prefix="mistudio-tests-")
atexit.register(shutil.rmtree, HOME, ignore_errors=True)

DATABASE = os.environ.get("MISTUDIO_TEST_DATABASE_URL", "")
#: Where the browser tests leave their pictures (tests/browser/camera.py).
PICTURES = os.environ.get("MISTUDIO_PICTURES", "")

#: Said to the tests, and read once more by each process of a run on several cores.
OURS = ("MISTUDIO_TEST_DATABASE_URL", "MISTUDIO_PICTURES")

# A developer's own settings must not reach the tests, nor the tests a developer's data.
for name in [n for n in os.environ if n.startswith("MISTUDIO_") and n not in OURS]:
    del os.environ[name]
os.environ |= {
    "MISTUDIO_HOME": HOME,
    "MISTUDIO_GPU_BACKEND": "simulated",
    "MISTUDIO_SIMULATED_GPUS": "24GiB,24GiB,80GiB",
    "MISTUDIO_KIND_PATHS": str(Path(__file__).parent / "rehearsal"),
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
for name in ("DATABASE_URL", "REDIS_URL", "CUDA_VISIBLE_DEVICES", "FAULT", "FAULT_ONCE", "PORT"):
    os.environ.pop(name, None)
if DATABASE:
    os.environ["DATABASE_URL"] = DATABASE
