"""Validation of requests. Pure functions; every error names the field and the valid range."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NoReturn

import msgspec

from radixrt.messages import TOKEN_BYTES, CacheAction, Cancel, Error, Grammar, Sampling
from radixrt.requests.grammar import check_grammar
from radixrt.tokens import ids_below
from radixrt.tokens.errors import FieldError

DEFAULT_TENANT = "default"
"""Of keys that are not given with a tenant, and of all requests where there are no keys."""
MAX_CHOICES = 128
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_ALLOWED = 1 << 16
MAX_BAD = 1024
MAX_BAD_TOKENS = 256
MAX_PINS = 4
MAX_PIN_SECONDS = 3600.0
MAX_NUMBER = (1 << 31) - 1
"""Workers use int32."""
MAX_TEMPERATURE = 3.4028234663852886e38
"""Workers use float32, of which this is the largest."""
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-4, 1e4
"""No logit that is divided or multiplied by this leaves float32."""


class Refused(FieldError):
    """A request that is not served. `code` is an HTTP status, `field` names the invalid field."""

    def __init__(self, field: str, message: str, code: int = 400, retry_after: float | None = None) -> None:
        super().__init__(field, message)
        self.code = code
        self.retry_after = retry_after

    def error(self, request_id: int | None) -> Error:
        return Error(request_id, self.code, str(self), self.field, self.retry_after)


def _refuse(field: str, message: str) -> NoReturn:
    raise Refused(field, f"{field} {message}")


def check_sampling(sampling: Sampling, vocab_size: int = 0, owner: str = "") -> None:
    """Raise Refused (400) unless every field is in range. With `vocab_size` 0, token ids are only checked to be >= 0.
    `owner`: the client's API key (see `grammar`).

    Conditions are written so that NaN is out of every range."""
    s = sampling
    if s.max_tokens is not None and s.max_tokens < 0:
        _refuse("max_tokens", "must be at least 0")
    if not 0 <= s.min_tokens <= MAX_NUMBER:
        _refuse("min_tokens", f"must be in [0, {MAX_NUMBER}]")
    if s.max_tokens is not None and s.min_tokens > s.max_tokens:
        _refuse("min_tokens", "must not exceed max_tokens")
    if not 0 <= s.temperature <= MAX_TEMPERATURE:
        _refuse("temperature", f"must be in [0, {MAX_TEMPERATURE:.1e}]")
    if not 0 <= s.top_p <= 1:
        _refuse("top_p", "must be in [0, 1]")
    if not -1 <= s.top_k <= MAX_NUMBER:
        _refuse("top_k", f"must be in [1, {MAX_NUMBER}]; 0 and -1 switch it off")
    if not 0 <= s.min_p <= 1:
        _refuse("min_p", "must be in [0, 1]")
    if not MIN_REPETITION_PENALTY <= s.repetition_penalty <= MAX_REPETITION_PENALTY:
        _refuse("repetition_penalty", f"must be in [{MIN_REPETITION_PENALTY:g}, {MAX_REPETITION_PENALTY:g}]")
    if not -2 <= s.presence_penalty <= 2:
        _refuse("presence_penalty", "must be in [-2, 2]")
    if not -2 <= s.frequency_penalty <= 2:
        _refuse("frequency_penalty", "must be in [-2, 2]")
    if s.logprobs is not None and not 0 <= s.logprobs <= MAX_LOGPROBS:
        _refuse("logprobs", f"must be in [0, {MAX_LOGPROBS}]")
    if s.stop:
        _check_stops(s.stop)
    if s.stop_token_ids:
        if len(s.stop_token_ids) > MAX_STOPS:
            _refuse("stop_token_ids", f"may have {MAX_STOPS} ids at most")
        _check_ids(min(s.stop_token_ids), max(s.stop_token_ids), "stop_token_ids", vocab_size)
    if s.logit_bias:
        if len(s.logit_bias) > MAX_BIASES:
            _refuse("logit_bias", f"may have {MAX_BIASES} entries at most")
        _check_ids(min(s.logit_bias), max(s.logit_bias), "logit_bias", vocab_size)
        if not all(-100 <= b <= 100 for b in s.logit_bias.values()):
            _refuse("logit_bias", "must be in [-100, 100]")
    if s.allowed_token_ids:
        if len(s.allowed_token_ids) > MAX_ALLOWED:
            _refuse("allowed_token_ids", f"may have {MAX_ALLOWED} ids at most")
        _check_ids(min(s.allowed_token_ids), max(s.allowed_token_ids), "allowed_token_ids", vocab_size)
    if s.bad_token_ids:
        _check_bad(s.bad_token_ids, vocab_size)
    _check_any_token(s, vocab_size)
    if s.grammar is not None:
        _check_grammar(s.grammar, owner)


def _check_any_token(s: Sampling, vocab_size: int) -> None:
    """Refuse restrictions that allow no first token. (Workers know eos as well, and refuse what is left.)"""
    banned = {ids[0] for ids in s.bad_token_ids if len(ids) == 1}
    if s.min_tokens > 0 and s.grammar is None:
        banned.update(s.stop_token_ids)
    if s.allowed_token_ids and banned.issuperset(s.allowed_token_ids):
        _refuse("allowed_token_ids", "must hold a token that bad_words, stop_token_ids and min_tokens do not ban")
    if vocab_size and len(banned) >= vocab_size:
        _refuse("bad_token_ids" if s.bad_token_ids else "stop_token_ids", "must not ban all tokens")


def _check_bad(sequences: Sequence[Sequence[int]], vocab_size: int) -> None:
    if len(sequences) > MAX_BAD:
        _refuse("bad_token_ids", f"may have {MAX_BAD} entries at most")
    for ids in sequences:
        if not 0 < len(ids) <= MAX_BAD_TOKENS:
            _refuse("bad_token_ids", f"entries must have 1 to {MAX_BAD_TOKENS} tokens")
        _check_ids(min(ids), max(ids), "bad_token_ids", vocab_size)


def _check_stops(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOPS:
        _refuse("stop", f"may have {MAX_STOPS} strings at most")
    if not all(stops):
        _refuse("stop", "must not hold an empty string")
    if max(map(len, stops)) > MAX_STOP_CHARS:
        _refuse("stop", f"strings may have {MAX_STOP_CHARS} characters")


def _check_grammar(grammar: Grammar, owner: str) -> None:
    try:
        check_grammar(grammar, owner=owner)
    except FieldError as problem:
        raise Refused(problem.field, str(problem)) from problem


def _check_ids(lowest: int, highest: int, field: str, vocab_size: int) -> None:
    if lowest < 0:
        raise Refused(field, f"{field} holds the token id {lowest}, which is negative")
    limit = vocab_size or 1 << 31
    if highest >= limit:
        raise Refused(field, f"{field} holds the token id {highest}; the vocabulary has {limit}")


def check_token_bytes(ids: bytes, field: str, vocab_size: int = 0) -> None:
    """Raise Refused (400) unless `ids` are little-endian int32, at least one, and all within `vocab_size` (0:
    unknown)."""
    if not ids:
        raise Refused(field, f"{field} is empty: at least one token is needed")
    if len(ids) % TOKEN_BYTES:
        raise Refused(
            field, f"{field} has {len(ids)} bytes: token ids are little-endian int32, {TOKEN_BYTES} bytes each"
        )
    if not ids_below(ids, vocab_size or 1 << 31):
        tokens = memoryview(ids).cast("i")
        _check_ids(min(tokens), max(tokens), field, vocab_size)


def check_pins(pins: list[tuple[int, float]], prompt_tokens: int) -> None:
    """Raise Refused (400) unless there are at most MAX_PINS pins, each within the prompt and for at most an hour."""
    if len(pins) > MAX_PINS:
        _refuse("pin", f"may have {MAX_PINS} entries at most")
    for tokens, seconds in pins:
        if not 0 < tokens <= prompt_tokens:
            _refuse("pin", f"must be of 1 to {prompt_tokens} tokens, which the prompt has")
        if not 0 < seconds <= MAX_PIN_SECONDS:
            _refuse("pin", f"must be for at most {MAX_PIN_SECONDS:.0f} seconds")


MAX_ACTIONS = 8
"""Of a request, when it ends."""


def check_action(action: CacheAction, field: str) -> None:
    """Raise Refused (400) for a time that is not above 0, or a range of tokens that ends before it begins."""
    if action.seconds is not None and not action.seconds > 0:
        _refuse(f"{field}.seconds", "must be above 0")
    if action.token_end is not None and action.token_end <= action.token_start:
        _refuse(f"{field}.token_end", "must be above token_start")


def check_actions(actions: list[CacheAction], field: str = "cache") -> None:
    """Raise Refused (400) for what cannot become of a request when it ends."""
    for index, action in enumerate(actions):
        if action.verb not in ("pin", "retain", "demote"):
            _refuse(f"{field}[{index}].verb", "must be pin, retain or demote, when a request ends")
        check_action(action, f"{field}[{index}]")


def check_cancel(cancel: Cancel) -> None:
    """Raise Refused (400) if the number of tokens up to a stop string is negative."""
    if cancel.tokens is not None and cancel.tokens < 0:
        _refuse("tokens", "must be at least 0")


def check_choices(n: int) -> None:
    """Raise Refused (400) unless 1 <= n <= MAX_CHOICES."""
    if not 1 <= n <= MAX_CHOICES:
        _refuse("n", f"must be in [1, {MAX_CHOICES}]")


def parse_api_keys(entries: Sequence[str]) -> dict[str, str]:
    """Parse entries `TENANT:KEY`, or `KEY` for one of DEFAULT_TENANT, into {key: tenant}. Raises ValueError that names
    an invalid entry (never its key)."""
    tenants: dict[str, str] = {}
    for number, entry in enumerate(entries, 1):
        tenant, key = entry.split(":", 1) if ":" in entry else (DEFAULT_TENANT, entry)
        if not key or not re.fullmatch(r"[\w.@-]+", tenant):
            raise ValueError(
                f"api_key number {number}: expected KEY or TENANT:KEY, TENANT of letters, digits and _ . @ -"
            )
        if key in tenants:
            raise ValueError(f"api_key number {number}: tenants {tenants[key]} and {tenant} have the same key")
        tenants[key] = tenant
    return tenants


class _Head(msgspec.Struct):
    id: int | None = None


_head = msgspec.msgpack.Decoder(_Head)


def refusal(request_id: int, problem: FieldError) -> Error:
    """The Error for a request with an invalid field."""
    if isinstance(problem, Refused):
        return problem.error(request_id)
    return Error(request_id, 400, str(problem), problem.field, reason=problem.reason)


def malformed(payload: bytes, problem: Exception) -> Error:
    """The Error for a payload that cannot be decoded, with its id if that can be read, and the path of the field."""
    try:
        request_id = _head.decode(payload).id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        request_id = None
    text = str(problem)
    path = re.search(r" - at `\$\.?([^`]*)`", text)
    return Error(request_id, 400, f"malformed message: {text}", path.group(1) if path else "")
