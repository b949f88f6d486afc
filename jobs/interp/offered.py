"""Which places the blocks of a model have, told without its weights."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from jobs.interp.errors import Unusable
from jobs.interp.site import HOOKS, Site, blocks_of, place_of

logger = logging.getLogger(__name__)


def missing_sites(folder: Path) -> dict[str, dict[str, Any]]:
    """For each place that blocks of the model in `folder` lack: their numbers (`blocks`) and the reason (`why`).

    The model is built on the meta device, where tensors have shapes and no numbers. Empty where everything is there,
    and where nobody can say; an extraction looks again.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        return missing_in(model)
    except (ImportError, ValueError, NotImplementedError) as error:  # Unusable is a ValueError
        logger.info("which sites the model has is not known before it is loaded: %s", error)
        return {}


def missing_in(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """The same of a model that is built."""
    found: dict[str, dict[str, Any]] = {}
    for block in range(len(blocks_of(model)[1])):
        for site in HOOKS:
            try:
                place_of(model, Site(block, site))
            except Unusable as error:
                found.setdefault(site, {"blocks": [], "why": str(error)})["blocks"].append(block)
    return found
