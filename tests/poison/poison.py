"""A kind whose import does what some libraries do: it touches CUDA in the process that forks (G39).

Only the flag is false: where torch is loaded, it is told that CUDA was initialised here.
"""

import sys

from tests.rehearsal.rehearsal import Kind  # noqa: F401 (a kind is found by this name)

if (torch := sys.modules.get("torch")) is not None:
    torch.cuda._initialized = True
