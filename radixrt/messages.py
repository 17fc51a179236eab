"""Every struct that crosses a process, as tagged msgspec unions grouped by edge.

    client  --ClientRequest-->  router  --ToWorker-->  worker
            <--ClientReply----          <--ToRouter--

Token ids travel as little-endian int32 `bytes` (4 bytes a token): `np.frombuffer(ids, "<i4")`
reads them in place. Nothing here imports anything of ours, and no tensor or pickle ever crosses.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]


# ---------------------------------------------------------------- shared by all edges


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a generated text must be: JSON of any kind, JSON by a schema (`text`: the schema as JSON), a match of a
    regular expression or of a grammar in EBNF, or free text with parts by schema (`text`: a structural tag of xgrammar
    as JSON)."""

    kind: Literal["json", "json_schema", "regex", "ebnf", "structural_tag"]
    text: str = ""


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to choose tokens. One object, passed whole from the client to the sampler.

    `seed=None` lets the router draw one, so that a request that moves to another worker goes on
    with the same random numbers: noise depends on (seed, position) alone.
    `min_tokens` bans stop ids and eos until that many tokens were generated.
    `logprobs` is the number of alternatives reported a token; 0 reports the chosen one only,
    None reports nothing.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: dict[int, float] = {}
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    grammar: Grammar | None = None


class Origin(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a request comes from, for the report: the program, the fork path, its depth in forks."""

    program: str = ""
    branch: str = ""
    depth: int = 0


Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Scope = Annotated[str, msgspec.Meta(min_length=16, max_length=64)]
DropReason = Literal["thinking", "opening", "rewritten", "not_found"]


class SessionFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Answers in a chat that were generated here: how many are spelled by their ids, how many of these the template
    writes in other words, and how many lost ids, by why: the template drops their thinking, or the opening before
    them, or writes them differently, or they are not found in what it writes."""

    kept: Count = 0
    respelled: Count = 0
    dropped: dict[DropReason, Count] = {}


class TokenLogprob(msgspec.Struct, array_like=True):
    """One token's natural log-probability; `top` holds (token id, logprob), most likely first."""

    token: int
    logprob: float
    top: list[tuple[int, float]] = []


class Usage(msgspec.Struct, frozen=True, omit_defaults=False):
    """Tokens of one request. `cached_tokens` are prompt tokens whose KV was reused (hits)."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    worker: str = ""


# ---------------------------------------------------------------- client -> router


class TextPrompt(msgspec.Struct, tag="text", frozen=True):
    text: str
    add_special_tokens: bool = True


class TokenPrompt(msgspec.Struct, tag="ids", frozen=True):
    ids: bytes


class ChatPrompt(msgspec.Struct, tag="chat", frozen=True):
    """Messages as OpenAI writes them. `partial` continues the last (assistant) message."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    partial: bool = False
    template_args: dict[str, Any] = {}


class PartsPrompt(msgspec.Struct, tag="parts", frozen=True):
    """Parts encoded one by one and concatenated, so that a generated part keeps its exact ids."""

    parts: list[TextPrompt | TokenPrompt]


Prompt = TextPrompt | TokenPrompt | ChatPrompt | PartsPrompt


class SaidText(msgspec.Struct, tag="text", frozen=True, array_like=True):
    """Text of the assistant's open message, or of a history without roles."""

    text: str


class SaidMessage(msgspec.Struct, tag="message", frozen=True, array_like=True):
    """A whole message of a chat."""

    role: str
    content: str


class TurnBegins(msgspec.Struct, tag="begins", frozen=True, array_like=True):
    """The assistant begins to speak: its message is open."""


class TurnEnds(msgspec.Struct, tag="ends", frozen=True, array_like=True):
    """Its message is complete."""


class SaidChoice(msgspec.Struct, tag="choice", frozen=True, array_like=True):
    """One of a Score's choices was taken: it stays encoded by itself, as it was scored."""

    text: str


class SaidAnswer(msgspec.Struct, tag="answer", frozen=True, array_like=True):
    """What was generated: all of its ids, and the text and stop that its Deltas had."""

    ids: bytes
    text: str
    stop: str | Count | None
    sampling: Sampling


Said = SaidText | SaidMessage | TurnBegins | TurnEnds | SaidChoice | SaidAnswer


class StatePrompt(msgspec.Struct, tag="state", frozen=True, omit_defaults=True):
    """What was said up to a state that the router keeps, and since. Nothing that is in the state is sent again.

    States are numbered by the client within a `scope`, a name that nobody guesses; 0 is the state in which nothing was
    said. An unknown state is answered with Error 410, field `prompt.state`: begin again from 0, with everything. With
    `save` the router keeps what was said and generated under that number, before it sends the last answer, if the
    request ends well; what had the number before is replaced. `replaces`: `state` is then not needed any more.
    `resumes`: a Pause of `state` is over.
    """

    scope: Scope
    state: Number = 0
    said: list[Said] = []
    save: Number = 0
    replaces: bool = False
    resumes: bool = False


class Generate(msgspec.Struct, tag="generate", kw_only=True, omit_defaults=True):
    """Generate `n` continuations. `id` is the client's own; replies carry it and a choice index.

    `text=False` leaves stop strings and text to the client (front ends that detokenize
    themselves). `stream=False` sends one Delta a choice, when it is finished.
    `cache_salt` narrows the namespace that the API key gives. `pin`: (tokens, seconds), prefixes of the prompt that
    the cache is to keep for that long after the answer, if it can. `session` is for the report.
    """

    id: int
    prompt: Prompt | StatePrompt
    sampling: Sampling = Sampling()
    model: str = ""
    n: int = 1
    stream: bool = True
    text: bool = True
    origin: Origin = Origin()
    api_key: str = ""
    cache_salt: str = ""
    pin: list[tuple[int, float]] = []
    session: SessionFacts = SessionFacts()


class Score(msgspec.Struct, tag="score", kw_only=True, omit_defaults=True):
    """Log-probability of each continuation of one prompt, in one round trip; no token is drawn."""

    id: int
    prompt: Prompt | StatePrompt
    choices: list[TextPrompt | TokenPrompt]
    model: str = ""
    origin: Origin = Origin()
    api_key: str = ""
    cache_salt: str = ""


class Cancel(msgspec.Struct, tag="cancel", omit_defaults=True):
    """Stop request `id`; what it computed stays cached. No reply follows, but where one choice of a Generate is named,
    if it has not ended: then its last Delta, with `finish="stop"` and the usage."""

    id: int
    index: int | None = None


class Tokenize(msgspec.Struct, tag="tokenize", kw_only=True):
    """`render_only` asks for the text that the template makes of a chat, without the ids, which cost far more."""

    id: int
    prompt: Prompt
    render_only: bool = False
    api_key: str = ""


class Detokenize(msgspec.Struct, tag="detokenize", kw_only=True):
    id: int
    ids: bytes
    api_key: str = ""


class Ask(msgspec.Struct, tag="ask", kw_only=True):
    """Ask the router about itself: `health`, `models`, `report` or `metrics`."""

    id: int
    what: Literal["health", "models", "report", "metrics"]
    api_key: str = ""


class Fork(msgspec.Struct, tag="fork", kw_only=True, omit_defaults=True):
    """Keep what was said up to now under `prompt.save`; `count` branches go on from there, at once. Their first
    requests are admitted together: for a moment from now they count as if all had come with the first of them."""

    id: int
    prompt: StatePrompt
    count: Annotated[int, msgspec.Meta(ge=1)]
    api_key: str = ""


class Pause(msgspec.Struct, tag="pause", kw_only=True, omit_defaults=True):
    """Nothing will be asked of a state for a while: its tokens stay cached until a request `resumes` it, if there is
    room, and for so many seconds at most (and for the router's `pause_seconds`)."""

    id: int
    scope: Scope
    state: Number
    seconds: float | None = None
    api_key: str = ""


class Forget(msgspec.Struct, tag="forget", kw_only=True, omit_defaults=True):
    """No state of a scope is needed any more."""

    id: int
    scope: Scope
    api_key: str = ""


class Share(msgspec.Struct, tag="share", kw_only=True):
    """From a front end: (key, value) of what all front ends may Recall with the same API key's tenant, while there is
    room; None: forget it."""

    id: int
    entries: list[tuple[bytes, bytes | None]]
    api_key: str = ""


class Recall(msgspec.Struct, tag="recall", kw_only=True):
    """From a front end: the answer is an Info whose data are the values of these keys, None for unknown ones."""

    id: int
    keys: list[bytes]
    api_key: str = ""


ClientRequest = Generate | Score | Cancel | Tokenize | Detokenize | Ask | Fork | Pause | Forget | Share | Recall


# ---------------------------------------------------------------- router -> client


class Delta(msgspec.Struct, array_like=True):
    """What one choice of one request gained. `finish` and `usage` come with the last one."""

    id: int
    index: int = 0
    ids: bytes = b""
    text: str = ""
    finish: FinishReason | None = None
    usage: Usage | None = None
    logprobs: list[TokenLogprob] | None = None
    stop: str | int | None = None
    """The stop string or token id that ended it."""


class Deltas(msgspec.Struct, tag="deltas"):
    """All that one step gave one client: a message a step, not a message a token."""

    items: list[Delta]


class Scored(msgspec.Struct, tag="scored"):
    """For each choice the log-probability of each of its tokens, and the usage summed over choices."""

    id: int
    logprobs: list[list[float]]
    usage: Usage


class Tokens(msgspec.Struct, tag="tokens"):
    """`ids` of a Tokenize, with the `text` that the template made of a chat; `text` of a Detokenize."""

    id: int
    ids: bytes = b""
    text: str = ""


class Info(msgspec.Struct, tag="info"):
    """The answer to Ask: a JSON-like value, for `metrics` Prometheus text. To Recall: values."""

    id: int
    data: Any


class Error(msgspec.Struct, tag="error"):
    """`code` is an HTTP status; `field` names what is wrong in the request; `id` None if unknown."""

    id: int | None
    code: int
    message: str
    field: str = ""
    retry_after: float | None = None
    """Seconds, with 429 and 503."""


class Done(msgspec.Struct, tag="done"):
    """The answer to Fork, Pause, Forget and Share."""

    id: int


ClientReply = Deltas | Scored | Tokens | Info | Error | Done


# ---------------------------------------------------------------- router -> worker


class Run(msgspec.Struct, tag="run", kw_only=True, omit_defaults=True):
    """Compute one sequence. `ids` is the prompt and, when a lost worker's request is taken over,
    the tokens already generated; the first `prompt_len` of them are the prompt.

    `score_from=k` asks for the log-probability of every token at index >= k of `ids` (k >= 1);
    with max_tokens 0 nothing is generated. `pin` is a Generate's. Runs of one `group` (0: none) are queued as if they
    had come with the first of them.
    """

    id: int
    namespace: str
    ids: bytes
    prompt_len: int
    sampling: Sampling
    score_from: int | None = None
    pin: list[tuple[int, float]] = []
    group: int = 0


class Pin(msgspec.Struct, tag="pin"):
    """Keep what is cached of `ids` for so many seconds, if there is room. `name` is for an Unpin."""

    name: int
    namespace: str
    ids: bytes
    seconds: float


class Unpin(msgspec.Struct, tag="unpin"):
    """A Pin is not needed any more."""

    name: int


class Abort(msgspec.Struct, tag="abort"):
    ids: list[int]


class Snapshot(msgspec.Struct, tag="snapshot"):
    """Send the whole tree as events (a Cleared, then Stored): the index has missed some."""


class Stop(msgspec.Struct, tag="stop"):
    """Finish nothing more and exit."""


ToWorker = Run | Abort | Snapshot | Stop | Pin | Unpin


# ---------------------------------------------------------------- worker -> router


class Stored(msgspec.Struct, tag="stored", frozen=True, array_like=True):
    """Run `run` grew: `ids` were cached at its index `at`. At 0 the run is new and hangs below
    (`parent`, `parent_at`): the first `parent_at` tokens of run `parent` (0: the root)."""

    namespace: str
    run: int
    at: int
    parent: int
    parent_at: int
    ids: bytes


class Removed(msgspec.Struct, tag="removed", frozen=True, array_like=True):
    """Run `run` keeps its first `keep` tokens; with 0 it is gone."""

    run: int
    keep: int


class Cleared(msgspec.Struct, tag="cleared", frozen=True, array_like=True):
    """Nothing is cached any more."""


CacheEvent = Stored | Removed | Cleared


class Load(msgspec.Struct, frozen=True, array_like=True):
    """A worker's state after a step, what placement needs. Rates are moving averages, 0 if unknown."""

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    """Tokens admitted or waiting that are not computed yet."""
    free_pages: int = 0
    evictable_pages: int = 0
    total_pages: int = 0
    prefill_rate: float = 0.0
    """Tokens a second while prefilling."""
    step_seconds: float = 0.0
    """Duration of a decode step."""
    evicted_tokens: int = 0
    """Since start."""
    preemptions: int = 0
    """Since start."""
    steps: int = 0
    plain_keys: int = 0
    """Since start: tokens whose K and V decodes attended to, counted for each of them, in a layer."""
    read_keys: int = 0
    """Of them, those that were read from memory: what requests of a batch share is read once."""
    busy_seconds: float = 0.0
    """Since start: that the device spent on steps."""
    forced_tokens: int = 0
    """Since start: generated tokens that a grammar left no choice of, and that were not drawn."""


class Register(msgspec.Struct, tag="register", kw_only=True):
    """First message of a worker. `name` is unique; a second Register of a name replaces the first."""

    name: str
    model: str
    max_model_len: int
    page_size: int
    total_pages: int
    max_running: int
    kv_dtype: str = ""
    device: str = "cpu"
    pid: int = 0
    vocab_size: int = 0
    """Token ids the model takes; 0 if unknown."""


class Output(msgspec.Struct, array_like=True):
    """What one request gained in a step. `cached_tokens` counts prompt tokens reused so far.
    `logprobs` belong to `tokens`; `scores` to the tokens asked for by `score_from`."""

    id: int
    tokens: list[int] = []
    finish: FinishReason | None = None
    cached_tokens: int = 0
    logprobs: list[TokenLogprob] | None = None
    scores: list[float] | None = None
    stop: int | None = None
    """The token id that ended it."""
    error: str = ""


class StepDone(msgspec.Struct, tag="step"):
    """One worker step. `seq` is the number of `events[0]` counted over the worker's life, so that
    the next message must begin at seq + len(events); a gap asks for a Snapshot. `snapshot` marks the
    answer to one: `events` start from nothing, and seq is where counting goes on."""

    outputs: list[Output]
    load: Load
    seq: int = 0
    events: list[CacheEvent] = []
    snapshot: bool = False


class Heartbeat(msgspec.Struct, tag="heartbeat"):
    """From the worker's own thread, so that a long step is not taken for a death."""

    name: str


class Leave(msgspec.Struct, tag="leave"):
    """A worker says goodbye; the launcher says it for one that it saw die."""

    name: str
    reason: str = ""


ToRouter = Register | StepDone | Heartbeat | Leave
