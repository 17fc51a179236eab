"""A reply as JSON by a schema that stands in the prompt; the values stand in a text."""

from __future__ import annotations

import json
from typing import Any

from training.nano.tasks.example import Example, Message, system, user
from training.nano.tasks.words import COLORS, DAYS, GIVEN, THINGS, Phrases, Words, fill

FIELDS: dict[str, tuple[str, str, tuple[str, ...], str]] = {
    # name: JSON type, maker, sentences of training that tell the value, the sentence of evaluation
    "name": (
        "string",
        "person",
        ("My name is {v}.", "The name is {v}.", "This is about {v}."),
        "The name here is {v}.",
    ),
    "age": ("integer", "age", ("The age is {v}.", "I am {v} years old.", "{v} years old."), "The age is {v} years."),
    "city": ("string", "name", ("I live in {v}.", "The city is {v}.", "It is in {v}."), "The city here is {v}."),
    "color": ("string", "color", ("The color is {v}.", "It is {v}."), "The color here is {v}."),
    "day": ("string", "day", ("It was on {v}.", "The day is {v}.", "Come on {v}."), "The day here is {v}."),
    "order": ("integer", "code", ("The order is {v}.", "Order number {v}."), "The order number is {v}."),
    "item": ("string", "item", ("The item is {v}.", "I want {v}.", "It is about {v}."), "The item here is {v}."),
    "count": ("integer", "count", ("I need {v} of them.", "The count is {v}."), "The count here is {v}."),
    "email": ("string", "mail", ("Write to {v}.", "The email is {v}."), "The email here is {v}."),
    "urgent": ("boolean", "flag", ("It is {v}.", "This is {v}."), "All this is {v}."),
    "boss": ("string", "person", ("The boss is {v}.", "The boss there is {v}."), "The boss here is {v}."),
    "room": ("string", "name", ("The room is {v}.", "Meet me in the room {v}."), "The room here is {v}."),
}
MORE: dict[str, tuple[str, ...]] = {
    "name": (
        "<call me|I am|this is|people call me|I go by|he is called|she is called|you know me as> {v}@end",
        "<my|the> <full |whole |first |>name @is {v}@end",
    ),
    "age": (
        "<I am|he is|she is|she turned|he turned|it is> {v}<| years old| years of age|, so old am I>@end",
        "<my|the|his|her|its> age @is {v}<| this year|>@end",
        "<aged|at the age of> {v}@end",
        "<after|for> {v} years <of life|on earth>@end",
    ),
    "city": (
        "<I live in|he lives in|she lives in|we are in|it happened in|come to|they moved to|all this is in|my "
        "home is> {v}@end",
        "<the|my|our> <city|town> @is {v}@end",
        "{v} is <where I live|the city|the place|my home>@end",
    ),
    "color": (
        "<it is|it was|paint it|I like it|we took it|make it|they are all|it looks> {v}@end",
        "<the|its|my> color @is {v}@end",
        "in {v}@end",
        "{v} is the color@end",
    ),
    "day": (
        "<it was on|it is on|come on|see you on|it happens on|we meet on|on|until|the meeting is on|not before> "
        "{v}@end",
        "<the|my|our> day @is {v}@end",
        "{v} is <the day|when it is|when we meet>@end",
    ),
    "order": (
        "<order|order number|my order is|the order is|order no.|it is about order|the number of my order is> {v}@end",
        "<the|my|our> order @is {v}@end",
        "{v} is <the order|my order|the number of the order>@end",
    ),
    "item": (
        "<the item is|I want|it is about|I ordered|we need|send me|please bring|they sell|I look for> {v}@end",
        "<the|my|our> item @is {v}@end",
        "{v} <is the item|is what I want|are what I ordered|are needed>@end",
    ),
    "count": (
        "<I need|we need|send|there are|give me|I ordered|they have|we count> {v}<| of them| of these| pieces>@end",
        "<the|our|my> <count|amount> @is {v}@end",
        "{v} <of them|pieces|in all|is the count>@end",
    ),
    "email": (
        "<write to|mail to|send it to|my address is|I read what comes to|reach me at|answer to|contact> {v}@end",
        "<the|my|our|his> <email|mail address> @is {v}@end",
        "{v} is <my email|the email|where to write>@end",
    ),
    "urgent": (
        "<it is|this is|that is|everything is|the matter is|my mail is|the request is|the thing was> {v}@end",
        "<I am sure|I think|note|by the way,> <this|it|that> is {v}@end",
        "{v}@end",
    ),
    "boss": (
        "<the boss is|our boss is|my boss is|the boss there is|I work for|we all obey> {v}@end",
        "<the|my|our> boss @is {v}@end",
        "{v} is <the boss|my boss|in charge|our boss>@end",
    ),
    "room": (
        "<the room is|meet me in the room|go to the room|we sit in room|the meeting is in room|come to room> {v}@end",
        "<the|my|our> room @is {v}@end",
        "{v} is <the room|my room|where we sit>@end",
        "room {v}@end",
    ),
}
"""Of training, beside those of FIELDS and GENERAL."""
FLAGS = {True: "urgent", False: "not urgent"}
INVENTED = ["The {k} here is {v}.", "And the {k} is {v}."]
GENERAL = Phrases(
    [
        "The {k} is {v}.",
        "Its {k} is {v}.",
        "{K}: {v}.",
        "@that<the|the|the|its|our|my|this|that|his|her> {k} @is {v}@end",
        "<the|the|its|our|my> {k} <there|now|today|right here|in this case|as it happens|of course|this time|below|"
        "given|we have|we use|noted|that I mean|they gave> @is {v}@end",
        "<here|there|now|today|then|in this case|this time|also,|besides,|next,|well,|but> <the|its|my> {k} @is "
        "{v}@end",
        "@that{v} <is|was|remains|will be> <the|the|its|our|my> {k}<| here| there|>@end",
        "<with|it has|we have|there is|they have|I have|has|having> <the|a|as the|as its> {k} {v}@end",
        "<for|as|as for|about|regarding> <the |>{k}<, |: |, please >"
        "<take|write|use|put|read|note|enter|it is|we have|I have|the value is|the answer is|> {v}@end",
        "@do<take|write|use|put|read|note|enter|set|store|keep> {v} <as|for|under> <the|its> {k}@end",
        "@do<put|change|fix> the {k} to {v}@end",
        "{k}<: | = | - |=|, namely | is | equals >{v}@end",
        "<(|- |* >{k}: {v}<)|>",
        "{v} (<the |>{k})@end",
        "the {k} (<{v}|it is {v}|that is {v}>)@end",
        "<what is the {k}?|the {k}?|{k}?> {v}@end",
        "{v} <goes by|stands for|is what we call|is meant by|counts as> the {k}@end",
        "<read on: |see: |look: |>the value of <the |>{k} @is {v}@end",
        "<if you ask for|if you want|whoever asks for> the {k}, <it is|take|say> {v}@end",
    ],
    INVENTED,
)
TOLD = {name: Phrases([*train, *MORE[name]], [told]) for name, (_, _, train, told) in FIELDS.items()}
LINES = ("{k}: {v}", "- {k}: {v}", "{k} = {v}", "* {k} - {v}", "{k}\t{v}", "| {k} | {v} |", "{k} -> {v}", "{k};{v}")
"""A text of training may be a list with one of these in each line."""
BY_SCHEMA = Phrases(
    [
        "Reply in JSON by this schema: {s}",
        "Answer with JSON. Schema: {s}",
        "Fill in this JSON schema: {s}",
        "Write JSON that follows the schema {s}",
        "<reply|answer|respond|write|tell me all> <|only |just >in <JSON|a JSON object|JSON only>< by| after| "
        "following|"
        ", following| that fits| according to|. Use|. Follow> <the|this|my> <JSON |>schema<:|> {s}",
        "<reply|answer|respond|come back> with <JSON|a JSON object|an object|only JSON> <that follows|that fits|of|"
        "according to|valid under> <the|this> <JSON |>schema<:|> {s}",
        "@do<fill in|use|follow|complete> <this|the> <JSON |>schema<:|> {s}",
        "<your answer|the answer|the reply|your reply|what you write> <must|should|has to|will> <fit|follow|"
        "match|be JSON by> "
        "<the|this> <JSON |>schema<:|> {s}",
        "<JSON schema|schema|the schema|format|output schema>: {s}",
        "@do<make|give me|produce|return|output|build> <JSON|a JSON object|an object>. <The schema|Schema|"
        "Schema of it>: {s}",
        "@do<make|give me|produce|return|output|write> JSON <from|out of> the <text|mail|lines> by the schema {s}",
        "{s}\n<reply|answer|write|respond> <by|with JSON by|in JSON by|following> <this|that> schema@end",
        "<extract|collect|take|read> <the data|the values|what is asked|all fields> <as JSON|into JSON>< by|:|, "
        "schema> {s}",
    ],
    ["Reply with JSON by the schema {s}", "Write JSON. Schema: {s}"],
)
BY_FIELDS = Phrases(
    [
        "Reply in JSON with the fields {f}.",
        "Answer with JSON: {f}.",
        "Give me the {f} as JSON.",
        "<reply|answer|respond> <|only |just >in <JSON|a JSON object> with <|the keys |these fields: |just the "
        "fields >{f}@end",
        "<reply|answer|respond> with <JSON|a JSON object|an object> <of|that has|holding|with> <|the fields |"
        "these keys: >{f}@end",
        "@do<make|give me|produce|return|output|build|show> <JSON|a JSON object|an object> <with|of|that holds> "
        "<|the fields |the keys >{f}@end",
        "@tell <the|> {f} <in JSON|as a JSON object|as JSON, please|as an object>@end",
        "<extract|collect|take|read> <|the fields |the values of >{f}<| from the text> <as|into> <JSON|a JSON "
        "object>@end",
        "<fields|keys|JSON fields|JSON with>: {f}",
    ],
    ["Write JSON with the fields {f}.", "Reply with the {f} as JSON."],
)
STARTS = Phrases(
    [
        "",
        "",
        "You read a mail and fill in a form.",
        "You are a helpful assistant.",
        "<you|your task is to|your job: you|please> <read|take|get> <a mail|a letter|a note|some lines|what I "
        "send|a story> and "
        "<fill in|complete|write|make> <a form|an object|JSON|a table>@end",
        "<you are|act as|be> <a helpful|an|a careful|a small|a kind> <clerk|assistant|helper><|. Read well|. "
        "You write JSON>@end",
    ],
    ["You read a text and fill in a form.", "You are a helpful agent."],
)
ASIDES = Phrases(
    [
        "<hello|hi|good morning|dear friend|dear all><,|.|!>",
        "<it rained|the sun was shining|all is well here|nothing else is new|I hope you are well|thanks a lot|"
        "see you|"
        "that is all|more to come|please read on|I write again|a short note>@end",
        "<my cat|my friend|the neighbor|somebody|a guest> <is asleep|came by|says hello|was here|sang>@end",
    ],
    [],
)
"""Of training: said between what is asked for."""


def make(w: Words, tag: str) -> Example:
    """tag: how many fields."""
    names = w.some(list(FIELDS), int(tag))
    if w.chance(0.4):
        names = [w.word() if w.chance(0.5) else name for name in names]
    properties, values, sentences = {}, {}, []
    line = w.pick(LINES) if w.training and w.chance(0.12) else ""
    for name in dict.fromkeys(names):
        kind, value, sentence = _field(w, name, line)
        properties[name] = {"type": kind}
        values[name] = value
        sentences.append(sentence)
    if w.training:
        sentences += _beside(w, line, properties)
    w.rng.shuffle(sentences)
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    asked = w.say(BY_SCHEMA, s=_shown(w, schema)) if w.chance(0.7) else w.say(BY_FIELDS, f=_listed(w, properties))
    text = _together(w, sentences, bool(line))
    if w.chance(0.5):
        messages: list[Message] = [*system(f"{w.say(STARTS)} {asked}".strip()), user(text)]
    else:
        messages = [user(f"{text}\n{asked}" if w.chance(0.5) else f"{asked}\n{text}")]
    gold = {"role": "assistant", "content": json.dumps(values)}
    return Example("json", tag, messages, [gold], lambda text, calls: _same(text, values), schema=schema)


def _same(text: str, values: dict[str, Any]) -> bool:
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return found == values and all(type(found[key]) is type(value) for key, value in values.items())


def _shown(w: Words, schema: dict[str, Any]) -> str:
    """The schema as text; in training in several layouts, some with less or more in them."""
    if not w.training or w.chance(0.5):
        return json.dumps(schema)
    shown = dict(schema)
    for key in ("additionalProperties", "required", "type"):
        if w.chance(0.2):
            del shown[key]
    if w.chance(0.2):
        properties = {
            k: v | {"description": w.pick(("the", "its", "a")) + f" {k}"} for k, v in shown["properties"].items()
        }
        shown["properties"] = properties
    if w.chance(0.3):
        shown = {key: shown[key] for key in w.some(list(shown), len(shown))}
    if w.chance(0.25):
        return json.dumps(shown, indent=w.pick((1, 2)))
    return json.dumps(shown, separators=(",", ":")) if w.chance(0.4) else json.dumps(shown)


def _listed(w: Words, properties: dict[str, Any]) -> str:
    names = list(properties)
    if w.training and w.chance(0.5):
        form = w.pick(("{k}", "{k}", '"{k}"', "'{k}'", "{k} ({t})", "{k}: {t}"))
        names = [form.replace("{k}", k).replace("{t}", v["type"]) for k, v in properties.items()]
        if w.chance(0.4):
            return w.pick((", ", ",", " / ", "; ")).join(names)
    return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else names[0]


def _beside(w: Words, line: str, properties: dict[str, Any]) -> list[str]:
    """What nobody asked for: other fields, other sentences."""
    found = []
    if w.chance(0.25):
        for _ in range(w.between(1, 3)):
            key = w.word()
            if key not in properties:
                found.append(_tell(w, key, w.pick((w.word, w.code, w.name))(), line, GENERAL))
    if not line and w.chance(0.25):
        found.append(w.say(ASIDES))
    return found


def _together(w: Words, sentences: list[str], lines: bool) -> str:
    if not w.training:
        return " ".join(sentences)
    if lines:
        return "\n".join(sentences)
    if w.chance(0.15):
        parts = [sentence.rstrip(".!?") for sentence in sentences]
        return w.pick((", ", "; ", " - ")).join(parts) + "."
    return w.pick((" ", " ", " ", "\n")).join(sentences)


def _tell(w: Words, key: str, shown: Any, line: str, phrases: Phrases) -> str:
    return fill(line, {"k": key, "v": shown}) if line else w.say(phrases, k=key, v=shown)


def _field(w: Words, name: str, line: str) -> tuple[str, str | int | bool, str]:
    """The type and value of a field, and the sentence that tells it."""
    if name in FIELDS:
        kind, maker, *_ = FIELDS[name]
    else:
        kind, maker = w.pick((("string", "name"), ("string", "word"), ("integer", "code"), ("string", "place")))
    value = _value(w, maker)
    shown = FLAGS[value] if isinstance(value, bool) else value
    phrases = TOLD.get(name, GENERAL)
    if w.training and maker != "flag" and w.chance(0.5):
        phrases = GENERAL
    if maker == "flag":
        line = ""
    return kind, value, _tell(w, name, shown, line, phrases)


def _value(w: Words, maker: str) -> str | int | bool:
    if maker == "flag":
        return w.chance(0.5)
    if maker in ("age", "count"):
        return w.between(2, 99)
    if maker == "code":
        return int(w.code(w.between(3, 5)))
    if maker == "mail":
        return f"{w.pick(GIVEN).lower()}@{w.word()}.com"
    lists = {"color": COLORS, "day": DAYS, "item": THINGS}
    return w.pick(lists[maker]) if maker in lists else getattr(w, maker)()
