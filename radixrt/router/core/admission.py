"""Turns a client's message into a Request: finds its tenant and model, validates it, and checks that it fits."""

from __future__ import annotations

import hmac
import random
from collections.abc import Mapping
from fnmatch import fnmatchcase

import msgspec

from radixrt.config import RouterConfig
from radixrt.messages import TOKEN_BYTES, Generate, Namespace, Sampling, Score, TokenPrompt
from radixrt.requests import validate
from radixrt.requests.validate import Refused
from radixrt.router.core.effects import Client
from radixrt.router.core.request import Request, RunState
from radixrt.router.core.workers import Serving, Workers
from radixrt.router.placement.cost import DEFAULT_PREFILL_RATE
from radixrt.tokens.errors import Room

SEED_MASK = (1 << 63) - 1
NO_LIMIT = (1 << 31) - 1
SPARE = 8
"""With several tenants, the last eighth of the queue's places is for tenants with no more than an eighth in flight: one
that fills all other places leaves room for the rest."""


class Admission:
    """Token ids are checked against the vocabulary that workers report, or else `vocab_size` (0: unknown)."""

    def __init__(self, config: RouterConfig, workers: Workers, vocab_size: int, rng: random.Random) -> None:
        self._config = config
        self._workers = workers
        self._vocab_size = vocab_size
        self._rng = rng
        self._tenants = validate.parse_api_keys(config.api_key)
        if config.admin_api_key in self._tenants:
            raise ValueError("--admin-api-key is the key of a tenant: it must be another one")
        several = len(set(self._tenants.values())) > 1
        self._spare = config.max_queued_requests // SPARE if several else 0
        """Places reserved for tenants with at most this many runs in flight."""

    @property
    def keys(self) -> list[str]:
        """See `RouterCore.keys`."""
        return [key for key in (*self._tenants, self._config.admin_api_key) if key] if self._tenants else []

    def tenant(self, api_key: str) -> str:
        """The tenant of a key. Raises Refused (401) if keys are configured and this is not one of them."""
        if not self._tenants:
            return validate.DEFAULT_TENANT
        tenant = self._tenants.get(api_key)
        if tenant is None:
            raise Refused("api_key", "unknown API key", 401)
        return tenant

    def is_admin(self, api_key: str) -> bool:
        """Whether this is the key of --admin-api-key."""
        admin = self._config.admin_api_key
        return bool(admin) and hmac.compare_digest(api_key.encode(), admin.encode())

    def check_admin(self, api_key: str, always: bool = False) -> None:
        """Raise Refused (401, 403) if LoRA adapters may not be changed here, or not with this key. Where no key is
        configured, any will do, unless only the admin's `always` will."""
        if not self._config.allow_runtime_lora_updating:
            raise Refused("", "LoRA adapters cannot be changed: --allow-runtime-lora-updating is off", 403)
        if not self._config.admin_api_key and not self._tenants and not always:
            return
        if not self.is_admin(api_key):
            code = 403 if api_key in self._tenants else 401
            raise Refused("api_key", "LoRA adapters are changed only with the key of --admin-api-key", code)

    def check_operator(self, api_key: str, always: bool = False) -> None:
        """Raise Refused (401, 403) if workers may not be told to leave with this key. Keys as in `check_admin`."""
        admin = self._config.admin_api_key
        if not admin and not self._tenants and not always:
            return
        if not admin or not hmac.compare_digest(api_key.encode(), admin.encode()):
            code = 403 if api_key in self._tenants else 401
            raise Refused("api_key", "workers are drained only with the key of --admin-api-key", code)

    def admit(
        self, client: Client, message: Generate | Score, runs_in_flight: int, runs_by_tenant: Mapping[str, int]
    ) -> Request:
        """Make the Request with its runs, none of which is dispatched yet. Raises FieldError if the message is not
        valid or does not fit."""
        tenant = self.tenant(message.api_key)
        model = self.model(message.model)
        if not isinstance(message.prompt, TokenPrompt):
            raise Refused("prompt", "only token ids are served here")
        serving, version = self._workers.serving(model), self._workers.version(model)
        vocab_size = serving.vocab_size or self._vocab_size
        validate.check_token_bytes(message.prompt.ids, "prompt", vocab_size)
        request = Request(
            client,
            message.id,
            Namespace(tenant, model, version, message.cache_salt),
            message.origin,
            stream=isinstance(message, Generate) and message.stream,
            scores=isinstance(message, Score),
            priority=message.priority,
        )
        if isinstance(message, Generate):
            self._add_choices(request, message, message.prompt.ids, serving, vocab_size)
        else:
            self._add_scores(request, message, message.prompt.ids, serving, vocab_size)
        request.open = len(request.runs)
        self._check_capacity(serving, runs_in_flight + request.open, runs_by_tenant.get(tenant, 0) + request.open)
        return request

    def model(self, name: str) -> str:
        """The name of the model that a request for `name` ("": any) gets; of an alias, which may have wildcards, it is
        that of the model. Raises Refused (404) if it is not served, and (503) if no worker serves yet."""
        default = self._config.served_model_name
        if default and name in ("", default):
            return default
        served = self._workers.models() | ({default} if default else set())
        if not served:
            raise Refused("model", "no worker serves yet", 503, self._config.worker_timeout)
        if not name:
            return min(served)
        if name in served or self._workers.serving(name).workers:  # the latter is cached
            return name
        served |= self._workers.adapters()
        if name not in served and any(name == one or fnmatchcase(name, one) for one in self._config.model_aliases):
            return self.model("")
        if name not in served:
            raise Refused("model", f"model {name!r} is not served here; {', '.join(sorted(served))} is", 404)
        return name

    def room(self, message: Generate | Score) -> Room | None:
        """What the prompt of a request has to fit into; None if no worker serves its model."""
        try:
            serving = self._workers.serving(self.model(message.model))
        except Refused:
            return None
        needs_output = isinstance(message, Generate) and message.sampling.max_tokens != 0
        return Room(serving.token_limit, int(needs_output)) if serving.workers else None

    def _add_choices(
        self, request: Request, message: Generate, prompt: bytes, serving: Serving, vocab_size: int
    ) -> None:
        sampling = message.sampling
        validate.check_choices(message.n)
        validate.check_sampling(sampling, vocab_size, message.api_key)
        validate.check_pins(message.pin, len(prompt) // TOKEN_BYTES)
        validate.check_actions(message.cache)
        request.pin, request.cache = message.pin, message.cache
        room = self._room(serving, len(prompt) // TOKEN_BYTES, 0 if sampling.max_tokens == 0 else 1)
        request.asked = sampling.max_tokens
        request.bounded = sampling.max_tokens is not None and sampling.max_tokens <= room
        max_tokens = sampling.max_tokens if request.bounded else room
        if message.prompt_logprobs and sampling.logprobs is None:
            raise Refused("prompt_logprobs", "only with logprobs")
        score_from = 1 if message.prompt_logprobs else None
        seed = self._rng.getrandbits(48) if sampling.seed is None else sampling.seed
        for index in range(message.n):
            own_seed = (seed + index) & SEED_MASK
            of_choice = msgspec.structs.replace(sampling, max_tokens=max_tokens, seed=own_seed, stop=())
            request.runs.append(RunState(request, index, prompt, of_choice, score_from))

    def _add_scores(self, request: Request, message: Score, prompt: bytes, serving: Serving, vocab_size: int) -> None:
        if not message.choices:
            raise Refused("choices", "choices is empty: at least one continuation is needed")
        if len(message.choices) > validate.MAX_CHOICES:
            raise Refused("choices", f"choices may have {validate.MAX_CHOICES} entries at most")
        sampling = Sampling(max_tokens=0, temperature=0.0, seed=0)
        for index, choice in enumerate(message.choices):
            if not isinstance(choice, TokenPrompt):
                raise Refused(f"choices[{index}]", "only token ids are served here")
            validate.check_token_bytes(choice.ids, f"choices[{index}]", vocab_size)
            ids = prompt + choice.ids
            self._room(serving, len(ids) // TOKEN_BYTES, 0)
            request.runs.append(RunState(request, index, ids, sampling, len(prompt) // TOKEN_BYTES))

    def _room(self, serving: Serving, tokens: int, least: int) -> int:
        """Tokens that fit after `tokens` prompt tokens on the worker with most room. Raises FieldError if they are
        fewer than `least`."""
        if not serving.workers:
            return NO_LIMIT
        limit = serving.token_limit
        Room(limit, least).check(tokens)
        return limit - tokens

    def has_places(self, runs: int, own: int) -> bool:
        """Whether `runs` runs may be in flight at once, `own` of which are one tenant's."""
        limit = self._config.max_queued_requests
        return runs <= limit if own <= self._spare else runs <= limit - self._spare

    def _check_capacity(self, serving: Serving, runs: int, own: int) -> None:
        """Raise Refused (503, 429) if no worker serves the model, or if there is no place for the request, with which
        there would be `runs` runs in flight, `own` of its tenant."""
        if not serving.workers:
            raise Refused("model", "no worker serves this model now", 503, self._config.worker_timeout)
        if not self.has_places(runs, own):
            queue = min(m.load.queued_tokens / (m.load.prefill_rate or DEFAULT_PREFILL_RATE) for m in serving.workers)
            raise Refused("", "too many requests in flight", 429, float(min(60, max(1, round(queue)))))
