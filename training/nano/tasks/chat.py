"""Small talk, and doing what the system prompt says, so that a chat reads as sense."""

from __future__ import annotations

from collections.abc import Callable

from training.nano.tasks.example import Example, mentions, says, system, user
from training.nano.tasks.words import COLORS, DAYS, GIVEN, THINGS, Phrases, Words

Check = Callable[[str], bool]

TALK: tuple[tuple[Phrases, str], ...] = (
    (
        Phrases(
            [
                "Hello!",
                "Hello.",
                "Hi!",
                "Hi there!",
                "Good morning!",
                "<hello|hi|hey|good day|good morning|good evening|greetings|welcome><| nano| friend| again| "
                "you| everybody>@end",
            ],
            ["Hi.", "Hello there!"],
        ),
        "Hello! How can I help?",
    ),
    (
        Phrases(
            [
                "Who are you?",
                "What are you?",
                "What is your name?",
                "Tell me who you are.",
                "<who|what> <exactly |really |>are you?",
                "@know <who|what> <you really are|exactly you are|I am talking to>@end",
                "<what is|tell me|say|give me|I want to know> your name@end",
                "<what|how> <do they call you|are you called>?",
            ],
            ["Tell me what you are.", "Say who you are."],
        ),
        "I am nano, a small language model.",
    ),
    (
        Phrases(
            [
                "What can you do?",
                "What are you good at?",
                "How can you help me?",
                "What do you do?",
                "@know what you <are able to do|do|are good for|offer>@end",
                "<what|which things> can you <do for me|do here|offer>?",
                "<how|with what> <can|could|will|would> you <help us|be of help|help me today|be useful>?",
                "what are <your skills|you for|you able to do>?",
            ],
            ["Tell me what you can do.", "How can you help?"],
        ),
        "I can find facts in a text, call tools and fill in JSON.",
    ),
    (
        Phrases(
            [
                "How are you?",
                "How are you today?",
                "Are you well?",
                "how <do you feel|is it going|goes it|have you been|is life|do you do today>?",
                "<are you|do you feel> <fine|well|good|all right|happy|ok>?",
            ],
            ["How do you do?"],
        ),
        "I am well, thank you.",
    ),
    (
        Phrases(
            [
                "Thank you!",
                "Thanks!",
                "Thanks a lot.",
                "Thank you so much.",
                "<thank you|thanks|many thanks|I thank you> <very much|nano|a lot|again|for that|for your help|"
                "for all|indeed|so much>@end",
            ],
            ["Thank you.", "Thanks."],
        ),
        "You are welcome.",
    ),
    (
        Phrases(
            [
                "Goodbye!",
                "Bye!",
                "See you!",
                "Good night!",
                "<goodbye|bye|bye bye|see you|good night|farewell> <nano|then|now|for now|friend|later|all>@end",
            ],
            ["Goodbye.", "Bye."],
        ),
        "Goodbye!",
    ),
    (
        Phrases(
            [
                "Are you a human?",
                "Are you a person?",
                "Are you real?",
                "are you <a man|a woman|alive|a living being|a person or a machine|one of us|human|really human|"
                "a true person>?",
                "@know if you are <human|a person|alive|real>@end",
            ],
            ["Are you a real person?", "Are you a real human?"],
        ),
        "No, I am a small language model.",
    ),
    (
        Phrases(
            [
                "What are you made of?",
                "How big are you?",
                "How large are you?",
                "how <many parameters|many weights|much|big> <do you have|are in you|make you>?",
                "@know how <big|large|small> you are@end",
                "what <size|shape> <do you have|are you>?",
                "how <tiny|little|large|huge> are you<| really| then>?",
            ],
            ["How big are you really?", "How small are you?"],
        ),
        "I have about 12 million parameters.",
    ),
    (
        Phrases(
            [
                "Do you know everything?",
                "Are you clever?",
                "Do you know a lot?",
                "do you know <very much|many things|the whole world|about the world|all things>?",
                "are you <smart|wise|bright|really clever|so clever|very smart|very wise>?",
                "@know if you <know much|are clever>@end",
            ],
            ["Do you know all?", "Are you very clever?"],
        ),
        "No, I know little. Give me a text or a tool.",
    ),
    (
        Phrases(
            [
                "Tell me a joke.",
                "Say something funny.",
                "Make me laugh.",
                "@do<make a joke|tell us a joke|be funny|say something very funny|tell a joke|make us laugh>@end",
                "do you know <a joke|jokes|something funny>?",
                "<a joke|jokes|something funny>, please@end",
            ],
            ["Tell me something funny.", "Say a joke."],
        ),
        "I know no jokes. I am better with tools.",
    ),
    (
        Phrases(
            [
                "Help!",
                "Help me.",
                "I need help.",
                "<help|some help|a little help|your help><|, please| now| me out>@end",
                "<can|could|would|will> you <help us|give me help|help me here|help me>?",
                "@do<help me out|give me some help>@end",
            ],
            ["Please help me.", "Can you help?"],
        ),
        "How can I help?",
    ),
    (
        Phrases(
            [
                "Good.",
                "Ok.",
                "Fine.",
                "Great!",
                "<good|ok|fine|great|right|very well|very nice|all good|nice|well done|perfect|so good|all fine>@end",
            ],
            ["All right.", "Very good."],
        ),
        "What is next?",
    ),
)
REPEAT = Phrases(
    [
        "Repeat after me: {t}",
        "Say this: {t}",
        "Repeat: {t}",
        "<please |now |can you |could you |><say|repeat|write|echo|copy|speak|type> <this|after me|the words|"
        "just this|"
        "exactly this|this after me|the following>: {t}",
        "<please |now |just ><say|repeat|write|echo|copy>: {t}",
    ],
    ["Repeat this: {t}", "Say: {t}"],
    varied=False,
)
SYSTEMS = Phrases(
    ["", "", "You are a helpful assistant.", "You are nano, a small agent.", "You are a small language model."],
    ["You are a small agent.", "You are a helpful agent."],
)


def small_talk(w: Words) -> tuple[str, str, Check]:
    """A question, its answer, and what a right answer is."""
    if w.chance(0.2):
        text = w.text() if w.chance(0.6) else f"{w.name()} {w.code(w.between(2, 4))}"
        return w.say(REPEAT, t=text), text, lambda said: said.strip() == text
    phrases, answer = w.pick(TALK)
    return w.say(phrases), answer, lambda said: said.strip() == answer


RULES: tuple[tuple[Phrases, Callable[[str, str], str]], ...] = (
    (
        Phrases(
            [
                "End every answer with the word {x}.",
                "Always end with the word {x}.",
                "End with {x}.",
                "<|always |please |you must |make sure to ><end|close|finish|stop> <with|each answer with|every "
                "reply with|all you say with> <the word |>{x}@end",
                "<the last word of every answer|your last word|what ends each answer> <is|must be|should be|has "
                "to be> {x}@end",
                "<after|behind> <every answer|what you say|each reply>, <add|put|write|say> <the word |>{x}@end",
            ],
            ["Always end your answer with {x}.", "End every answer with {x}."],
        ),
        lambda answer, x: f"{answer} {x}",
    ),
    (
        Phrases(
            [
                "Begin every answer with the word {x}.",
                "Always begin with the word {x}.",
                "Begin with {x}.",
                "<|always |please |you must |make sure to ><begin|start|open> <with|each answer with|every "
                "reply with|all you say with> <the word |>{x}@end",
                "<the first word of every answer|your first word|what begins each answer> <is|must be|should be|"
                "has to be> {x}@end",
                "<before> <every answer|what you say|each reply>, <put|write|say> <the word |>{x}@end",
            ],
            ["Always begin your answer with {x}.", "Begin every answer with {x}."],
        ),
        lambda answer, x: f"{x} {answer}",
    ),
    (
        Phrases(
            [
                "Answer everything with the word {x}.",
                "Say only {x}.",
                "Always say just {x}.",
                "<|always |please |you must |whatever comes, ><answer|say|reply|write> <just|nothing but|no "
                "other word than|only the single word> {x}@end",
                "<answer|reply to> <everything|all|every question|whatever comes> <with|by> <|just |the one "
                "word |the word >{x}@end",
                "<your only word|the only answer|all that you say> <is|must be|should be> {x}@end",
            ],
            ["Answer only with the word {x}.", "Always say only {x}."],
        ),
        lambda answer, x: x,
    ),
)
NAMED = Phrases(
    [
        "Your name is {x}.",
        "You are called {x}.",
        "You are {x}, a helpful assistant.",
        "<they|we|people|users> call you {x}@end",
        "<your name|the name you have> @is {x}@end",
        "you <go by|have the name|answer to> {x}@end",
        "<act as|be> {x}<|, an agent|, a kind helper>@end",
    ],
    ["Your name is {x}. Be helpful.", "You are {x}, a small agent."],
)
NAME_QUESTIONS = TALK[1][0]
LIKES = Phrases(
    [
        "I am {p} and I like {c} {t}.",
        "My name is {p}. I like {c} {t}.",
        "I am {p}. On {d} it rained. I like {c} {t}.",
        "<hello, |well, |hey, |><I am|my name is|call me|people call me|it is me,> {p}<. I| and I|, and I|; I> "
        "<like|love|collect|am fond of> {c} {t}@end",
        "I <like|love> {c} {t}<. My name is| and my name is|. I am|, and I am called> {p}@end",
    ],
    ["Hi, I am {p} and I like {c} {t}.", "My name is {p} and I like {c} {t}."],
)
ABOUT = (
    (
        Phrases(
            [
                "What is my name?",
                "Who am I?",
                "@know <who I am|what my name is|how I am called>@end",
                "@tell my name@end",
                "what am I called?",
            ],
            ["Do you know my name?"],
        ),
        "Your name is {p}.",
    ),
    (
        Phrases(
            [
                "What do I like?",
                "Which things do I like?",
                "@know <what I like best|which things I like|what I am fond of>@end",
                "what <was it|is it> that I like?",
                "what things <do I love|are dear to me>?",
            ],
            ["Tell me what I like."],
        ),
        "You like {c} {t}.",
    ),
)


def make(w: Words, tag: str) -> Example:
    """tag: "talk", or "obey" a rule of the system prompt."""
    rule = ""
    if tag == "talk":
        messages, answer, check = _about_me(w) if w.chance(0.3) else _talk(w)
    elif w.chance(0.25):
        name = w.name()
        messages = [*system(w.say(NAMED, x=name)), user(w.say(NAME_QUESTIONS))]
        answer, check = f"I am {name}.", lambda said: mentions(said, name)
    else:
        phrases, apply = w.pick(RULES)
        word = w.pick((w.word, w.name, lambda: w.pick(COLORS)))()
        rule = w.say(phrases, x=word)
        start = w.say(SYSTEMS)
        question, plain, _ = small_talk(w)
        messages = [*system(f"{start} {rule}".strip()), user(question)]
        answer = apply(plain, word)
        check = lambda said: said.strip() == answer  # noqa: E731
    return Example("chat", tag, messages, [says(answer)], lambda text, calls: not calls and check(text))


def _talk(w: Words) -> tuple[list, str, Check]:
    question, answer, check = small_talk(w)
    messages = system(w.say(SYSTEMS))
    if w.chance(0.3):
        before, said, _ = small_talk(w)
        messages += [user(before), says(said)]
    return [*messages, user(question)], answer, check


def _about_me(w: Words) -> tuple[list, str, Check]:
    """What the user said two turns before."""
    values = {
        "p": w.pick(GIVEN) if w.chance(0.4) else w.name(),
        "c": w.pick(COLORS),
        "t": w.pick(THINGS),
        "d": w.pick(DAYS),
    }
    phrases, template = w.pick(ABOUT)
    answer = template
    for key, value in values.items():
        answer = answer.replace("{" + key + "}", value)
    first = [user(w.say(LIKES, **values)), says("I see.")]
    return [*system(w.say(SYSTEMS)), *first, user(w.say(phrases))], answer, lambda said: said.strip() == answer
