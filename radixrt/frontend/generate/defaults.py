"""Default sampling parameters: those that the model's `generation_config.json` recommends, as in vLLM and SGLang, or
those of OpenAI's API."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from radixrt.messages import Sampling
from radixrt.requests.validate import check_sampling
from radixrt.tokens.errors import FieldError

log = logging.getLogger("radixrt.frontend")

FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
Defaults = Mapping[str, Any]
"""Fields of Sampling."""


def sampling_defaults(setting: str, generation: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults by `setting`, which is `FrontendConfig.generation_config`, and `generation`, the content of the file
    of that name ({} without one). Invalid values are left out, with a warning."""
    found = {}
    for name in FIELDS if setting == "auto" else ():
        value = generation.get(name)
        if value is None or value == getattr(Sampling(), name):
            continue
        try:
            check_sampling(Sampling(**{name: _number(name, value)}))
        except FieldError as problem:
            log.warning("generation_config.json: %s; it is not used", problem)
        else:
            found[name] = value
    if found:
        log.info("requests that do not say otherwise: %s", ", ".join(f"{k} {v}" for k, v in found.items()))
    return found


def _number(name: str, value: Any) -> Any:
    """Check that a value has the type of its field; raises FieldError if not."""
    if isinstance(value, bool) or not isinstance(value, int if name == "top_k" else int | float):
        raise FieldError(name, f"{name} must be a number, not {value!r}")
    return value
