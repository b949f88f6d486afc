"""A kind for `bench.work_base_cost`: tells the private memory of its process at four moments."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rest_framework import serializers

from gpus import procfs
from jobs.kind import Context, Estimate, Input, JobKind, Values


class Kind(JobKind):
    label = "Base cost"
    stage = "steering"
    description = "Measures its own process."
    example = {}

    class Params(serializers.Serializer):
        pass

    def estimate(self, params: Values, inputs: Mapping[str, Input]) -> Estimate:
        return Estimate.of({"nothing": 1})

    def run(self, context: Context, params: Values) -> dict[str, Any]:
        found = {"at the start": private()}
        import torch

        found["torch imported"] = private()
        torch.set_grad_enabled(False)
        a = torch.randn(64, 64)
        (a @ a).sum().item()
        found["after a matmul of 64 x 64"] = private()
        import transformers

        for name in ("AutoModelForCausalLM", "AutoTokenizer", "LlamaForCausalLM"):
            getattr(transformers, name)  # imported at this moment
        found["transformers' model classes"] = private()
        return found


def private() -> int:
    return procfs.private_bytes(os.getpid()) or 0
