"""What tools are for, with their phrasings."""

from __future__ import annotations

from typing import NamedTuple

from training.nano.tasks.phrases import Phrases


class Domain(NamedTuple):
    """What a tool is for. names, descriptions: some of each. arguments: for each, how it may be called, its JSON type
    and the maker of its values; requests name them as {0}, {1}. results: of a tool that finds something out; without,
    the tool does something and replies "ok". more: descriptions of training alone. act, thing: of those that are
    close, what is done, and to what."""

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    arguments: tuple[tuple[tuple[str, ...], str, str], ...]
    requests: Phrases
    results: tuple[str, ...] = ()
    more: Phrases | None = None
    act: str = ""
    thing: str = ""


def only(*train: str) -> Phrases:
    """Of training alone."""
    return Phrases(train, ())


def told(*train: str) -> Phrases:
    """Descriptions of training alone: as they stand, without words that add nothing."""
    return Phrases([text.replace("@end", "<.|.|.|>") for text in train], (), varied=False)


CITY = (("city", "place", "location"), "string", "city")
TEXT = (("text", "message", "content"), "string", "text")
DEVICE = (("device", "name", "target"), "string", "device")
HOUR = (("hour", "time"), "integer", "hour")
DAY = (("day", "date"), "string", "day")
PERSON = (("person", "to", "recipient"), "string", "someone")

DOMAINS = (
    Domain(
        ("weather", "get_weather", "weather_of"),
        ("Tells the weather in a city.", "Weather of a place."),
        (CITY,),
        Phrases(
            [
                "What is the weather in {0}?",
                "How is the weather in {0} today?",
                "Tell me the weather in {0}.",
                "<how|what> <is|was|will be> the weather <at|of|over|around> {0}<| today| now| this week>?",
                "@tell the weather <at|of|for|in|around> {0}<| today| now|>@end",
                "<how is it|is it cold|is it warm|does it rain|will it rain|is there snow|what does the sky "
                "look like> in {0}<| today| now>?",
                "@know <how the weather is|what the weather is|if it rains> in {0}@end",
                "{0}<: |, ><what weather is there|how is the weather|the weather please>?",
            ],
            ["What is the weather like in {0}?", "I need the weather in {0}."],
        ),
        ("rain, {n} degrees", "sun, {n} degrees", "snow, {n} degrees", "wind, {n} degrees"),
        more=told(
            "<tells|gives|shows|finds|says|reports> <the weather|how the weather is> <in|of|at|for> a <city|"
            "place|town>@end"
        ),
    ),
    Domain(
        ("weather_on", "forecast", "get_forecast"),
        ("Tells the forecast for a city on a day.", "Forecast of a place and a day."),
        (CITY, DAY),
        Phrases(
            [
                "What is the forecast for {0} on {1}?",
                "Tell me the forecast on {1} in {0}.",
                "@tell the forecast <for|of|in> {0} <on|for> {1}@end",
                "@tell the forecast <for|on> {1} <for|in|of> {0}@end",
                "<how|what> will the weather be <in|at> {0} on {1}?",
                "on {1}, <what is|what will be|how is> the <weather|forecast> <in|for> {0}?",
                "@know <how it will be|if it will rain> in {0} on {1}@end",
            ],
            ["I need the forecast for {0} on {1}."],
        ),
        ("rain, {n} degrees", "sun, {n} degrees", "clouds, {n} degrees"),
        more=told(
            "<tells|gives|shows|finds|predicts> the <forecast|weather|coming weather> <of|for|in> a <city|"
            "place> <on|for> a <day|date>@end"
        ),
    ),
    Domain(
        ("translate", "translator", "translate_text"),
        ("Translates a text to a language.", "Translate a text."),
        ((("text", "source"), "string", "text"), (("language", "to"), "string", "language")),
        Phrases(
            [
                "Translate {0} to {1}.",
                "Please translate {0} to {1}.",
                "What is {0} in {1}?",
                "@do<translate|turn|put|change|bring> {0} <to|into|to> {1}@end",
                "@do<translate|say|write> {0} in {1}@end",
                "<how do you say|how is|what does one say for|what would be|what is the word for> {0} in {1}?",
                "@tell the {1} <word|words|translation> <for|of> {0}@end",
                "@know what {0} is in {1}@end",
                "@do<say|give me> in {1}: {0}",
            ],
            ["Can you translate {0} to {1}?", "I need {0} in {1}."],
        ),
        ("{word}", "{word} {word}"),
        more=told("<translates|turns|puts|brings> <a text|words|some words> <to|into> <a|another> language@end"),
    ),
    Domain(
        ("set_alarm", "alarm", "wake_me"),
        ("Sets an alarm for an hour.", "Set an alarm."),
        (HOUR,),
        Phrases(
            [
                "Set an alarm for {0}.",
                "Please set an alarm for {0}.",
                "I need an alarm at {0}.",
                "Wake me at {0}.",
                "@do<set|make|start|put|give me> an alarm <for|at> {0}@end",
                "@do<wake me|get me up|ring|let it ring> at {0}@end",
                "I <have to|want to|must> <get up|wake up|be up|rise> at {0}@end",
                "<alarm|an alarm><:| at| for> {0}@end",
                "@do<set the|set an|put the> alarm <clock |>to {0}@end",
            ],
            ["Can you set an alarm for {0}?", "Set my alarm for {0}."],
        ),
        more=told("<sets|makes|starts> an alarm <for|at> <an hour|a time>@end"),
    ),
    Domain(
        ("send_message", "send_mail", "write_to"),
        ("Sends a message to a person.", "Send a person a text."),
        (PERSON, TEXT),
        Phrases(
            [
                "Send {0} the message {1}.",
                "Write to {0}: {1}",
                "Send the message {1} to {0}.",
                "@do<send|write|text|mail|tell> {0} <the message|this|the text|the words|this message>:< |\n>{1}",
                "@do<send|give|bring> {0} the <message|text|words|note> {1}@end",
                "@do<send|write> <the message|the text|the words|> {1} to {0}@end",
                "@do<tell|inform|let> {0}<| know>: {1}",
                "<a message|mail|a text> <for|to> {0}: {1}",
                "{0} <should|must> <get|have|read> the <message|text> {1}@end",
            ],
            ["Can you send {0} the message {1}?", "Please write to {0}: {1}"],
        ),
        more=told("<sends|mails|writes|gives> <a message|a text|words> to <a person|somebody|a recipient>@end"),
    ),
    Domain(
        ("play", "play_song", "music"),
        ("Plays a song.", "Play music."),
        ((("song", "title"), "string", "text"),),
        Phrases(
            [
                "Play the song {0}.",
                "Please play {0}.",
                "I want to hear {0}.",
                "@do<play|put on|start|let me hear> <the song |the music |>{0}@end",
                "I <would like to|want to|need to|feel like I must> <hear|listen to> {0}@end",
                "<the song|music><:|, please:| please,> {0}@end",
                "@do<listen|dance> to {0} <with me|>@end",
            ],
            ["Can you play {0}?", "I want to hear the song {0}."],
        ),
        more=told("<plays|puts on|starts> <a song|music|a piece of music>@end"),
    ),
    Domain(
        ("search", "web_search", "find_pages"),
        ("Searches the web.", "Search for pages on the web."),
        ((("query", "search", "about"), "string", "text"),),
        Phrases(
            [
                "Search the web for {0}.",
                "Search for {0}.",
                "Please search for pages about {0}.",
                "@do<search|look|ask> <the web|on the web|the internet|> for {0}@end",
                "@do<find|look for|show me|search for|get> <pages|something|a page|news|sites> <about|on> {0}@end",
                "what does the web <say|know|have> about {0}?",
                "@do<google|look up|search> {0}< on the web|>@end",
            ],
            ["Can you search for {0}?", "Search the web for pages about {0}."],
        ),
        ("{n} pages about {word}", "a page about {word}"),
        more=told("<searches|looks through|asks> the <web|internet> <for|about> <a query|something|pages>@end"),
    ),
    Domain(
        ("turn_on", "switch_on", "start_device"),
        ("Turns a device on.", "Switch a device on."),
        (DEVICE,),
        Phrases(
            [
                "Turn on the {0}.",
                "Switch the {0} on.",
                "Please turn the {0} on.",
                "@do<turn|switch|put> <on the {0}|the {0} on>@end",
                "@do<power up|start up|activate|enable> the {0}@end",
                "the {0} <should|must|has to|shall> <be|go|be turned|be switched> on@end",
                "@do<let|have|get> the {0} <run|work|go on>@end",
                "<on with|power to|light up> the {0}@end",
                "I <need|want> the {0} <on|to be on|turned on|to go on|to run>@end",
            ],
            ["Can you turn on the {0}?", "Please switch on the {0}."],
        ),
        more=told("<turns|switches|puts|powers> <a device on|on a device|on a thing|something on>@end"),
    ),
    Domain(
        ("turn_off", "switch_off", "stop_device"),
        ("Turns a device off.", "Switch a device off."),
        (DEVICE,),
        Phrases(
            [
                "Turn off the {0}.",
                "Switch the {0} off.",
                "Please turn the {0} off.",
                "@do<turn|switch|put> <off the {0}|the {0} off>@end",
                "@do<power down|shut down|deactivate|disable> the {0}@end",
                "the {0} <should|must|has to|shall> <be|go|be turned|be switched> off@end",
                "@do<let|have|get> the {0} <rest|stop|go off>@end",
                "<off with|no power to> the {0}@end",
                "I <need|want> the {0} <off|to be off|turned off|to go off|to stop>@end",
            ],
            ["Can you turn off the {0}?", "Please switch off the {0}."],
        ),
        more=told("<turns|switches|puts|powers> <a device off|off a device|off a thing|something off>@end"),
    ),
    Domain(
        ("set_color", "paint", "color_of_lamp"),
        ("Gives a device a color.", "Set the color of a device."),
        (DEVICE, (("color", "shade"), "string", "color")),
        Phrases(
            [
                "Make the {0} {1}.",
                "Set the color of the {0} to {1}.",
                "Please make the {0} {1}.",
                "@do<make|paint|color|turn|dye> the {0} {1}@end",
                "@do<set|change|put|turn|switch> the <color|shade> of the {0} to {1}@end",
                "@do<give|let> the {0} <the color|a shade of|the shade> {1}@end",
                "the {0} <should|must|shall> <be|become|turn|get> {1}@end",
                "@do<set|change|switch> the {0} <to the color|to a|to be> {1}@end",
                "I want <{1} for the {0}|the {0} in {1}|the {0} to be {1}>@end",
            ],
            ["Can you make the {0} {1}?", "Set the {0} to {1}."],
        ),
        more=told("<gives|sets|changes> <the color of a device|a device its color|what color a device has>@end"),
    ),
    Domain(
        ("price", "get_price", "price_of"),
        ("Tells the price of a thing.", "Price of a thing."),
        ((("item", "thing", "product"), "string", "item"),),
        Phrases(
            [
                "What is the price of the {0}?",
                "Tell me the price of the {0}.",
                "How much are the {0}?",
                "@tell the <price|cost> of <the |>{0}@end",
                "<how much|what> <do|does|would> <the |>{0} cost?",
                "@know <what {0} cost|how much {0} cost|how much to pay for {0}>@end",
                "<how expensive|how cheap> are {0}?",
            ],
            ["I need the price of the {0}.", "Do you know the price of the {0}?"],
        ),
        ("{n} euros", "{n} dollars"),
        more=told("<tells|gives|shows|finds> <the price of a thing|what a thing costs|how much a thing costs>@end"),
    ),
    Domain(
        ("order", "buy", "order_items"),
        ("Orders a number of things.", "Buy things."),
        ((("item", "thing", "product"), "string", "item"), (("count", "number", "amount"), "integer", "count")),
        Phrases(
            [
                "Order {1} {0}.",
                "Please buy {1} {0}.",
                "Buy {1} {0} for me.",
                "I want to order {1} {0}.",
                "@do<order|buy|get|fetch|send me|bring me> {1} {0}<| for me| at the shop>@end",
                "I <want|need|would like|take> <to buy |to have |to get |>{1} {0}@end",
                "@do<place|make|send> an order <of|for> {1} {0}@end",
                "<an order|my order><:| is> {1} {0}@end",
                "{1} {0}, please. <Order them|Buy them|I will pay>@end",
            ],
            ["Can you order {1} {0}?", "Please order {1} {0} for me."],
        ),
        more=told("<orders|buys> <things|a count of things|some of an item>@end"),
    ),
    Domain(
        ("book_room", "reserve_room", "room"),
        ("Books a room for an hour.", "Reserve a room."),
        ((("room", "name"), "string", "name"), HOUR),
        Phrases(
            [
                "Book the room {0} at {1}.",
                "Please reserve the room {0} for {1}.",
                "I need the room {0} at {1}.",
                "@do<book|reserve|get|keep|hold> <the |>room {0} <at|for|from> {1}@end",
                "I <want|need|would like|take> the room {0} <at|for|from> {1}@end",
                "<at|for|from> {1}, @do<book|reserve|keep> the room {0}@end",
                "the room {0} <should be|must be|shall be> <mine|ours|booked|reserved> at {1}@end",
                "@do<make|place> a <booking|reservation> of the room {0} <at|for> {1}@end",
            ],
            ["Can you book the room {0} for {1}?", "Reserve the room {0} at {1}."],
        ),
        more=told("<books|reserves|keeps|gets> a room <for an hour|at a time|for a meeting>@end"),
    ),
    Domain(
        ("add_note", "note", "remember"),
        ("Keeps a note.", "Write a note."),
        (TEXT,),
        Phrases(
            [
                "Note this: {0}",
                "Please keep the note {0}.",
                "Write a note: {0}",
                "@do<note|write down|keep|remember|put down|save|store><: | this: | the words: | the note: >{0}",
                "@do<keep|write|make|add|save|take> <a|the|this> note<: | >{0}",
                "<a note|note|for my notes|to the notes>: {0}",
                "@do<add|put|write> {0} <to|into> <the|my> notes@end",
            ],
            ["Keep this note: {0}", "Please write the note {0}."],
        ),
        more=told("<keeps|writes|saves|adds|stores> <a note|a text as a note|what is to be remembered>@end"),
    ),
    Domain(
        ("phone_number", "get_number", "phone_book"),
        ("Tells the phone number of a person.", "Phone number of a person."),
        ((("person", "name"), "string", "someone"),),
        Phrases(
            [
                "What is the phone number of {0}?",
                "Tell me the phone number of {0}.",
                "I want to call {0}.",
                "@tell <the|a> <phone number|number|phone> of {0}@end",
                "I <want to|must|need to|would like to> <call|phone|ring|speak to|talk to> {0}@end",
                "<how|under what number> can I <call|reach|phone> {0}?",
                "what number does {0} have?",
                "@know the phone number <that {0} has|for {0}>@end",
            ],
            ["I need the phone number of {0}.", "Do you know the phone number of {0}?"],
        ),
        ("{code}",),
        more=told("<tells|gives|finds|looks up|shows> <the phone number|the number> of <a person|somebody>@end"),
    ),
    Domain(
        ("timer", "set_timer", "start_timer"),
        ("Starts a timer of some minutes.", "Set a timer."),
        ((("minutes", "duration"), "integer", "count"),),
        Phrases(
            [
                "Set a timer for {0} minutes.",
                "Start a timer of {0} minutes.",
                "Please set a timer of {0} minutes.",
                "@do<set|start|make|run|give me|begin> a timer <of|for|with> {0} minutes@end",
                "@do<count|wait|time|stop after> {0} minutes@end",
                "@do<tell me|ring|remind me> <in|after> {0} minutes@end",
                "<a timer|timer><:| for| of> {0} minutes@end",
                "I <want|would like> a timer <of|with> {0} minutes@end",
                "{0} minutes<, please|> on the timer@end",
            ],
            ["Can you start a timer of {0} minutes?", "I need a timer for {0} minutes."],
        ),
        more=told("<starts|sets|runs> a timer <of|for> <some|a number of> minutes@end"),
    ),
    Domain(
        ("read_file", "open_file", "show_file"),
        ("Reads a file.", "Show what is in a file."),
        ((("path", "file", "name"), "string", "file"),),
        Phrases(
            [
                "Read the file {0}.",
                "What is in the file {0}?",
                "Please show the file {0}.",
                "Open {0}.",
                "@do<read|open|show|print|display|load> <the file |me the file |>{0}@end",
                "what <is written in|is there in|stands in|do we have in> <the file |>{0}?",
                "@do<show|tell> me what <is in|stands in|is written in> the file {0}@end",
                "@tell the <content|text|lines> of <the file |>{0}@end",
                "I <want|need> to <read|see> <the file |>{0}@end",
            ],
            ["Can you read the file {0}?", "Show what is in {0}."],
        ),
        ("{word} {word} {n}", "{word} {n}"),
        more=told("<reads|opens|shows|prints> <a file|what is in a file|the text of a file>@end"),
    ),
    Domain(
        ("calendar", "add_event", "plan_event"),
        ("Puts an event into the calendar.", "Plan an event on a day."),
        ((("event", "title"), "string", "text"), DAY, HOUR),
        Phrases(
            [
                "Plan {0} on {1} at {2}.",
                "Put {0} into the calendar on {1} at {2}.",
                "@do<plan|put|add|enter|set|write|note> {0} <on|for> {1} <at|for> {2}@end",
                "@do<put|add|enter|write> {0} <into|in|to> <the|my> calendar <on|for> {1} at {2}@end",
                "on {1} at {2}<, there| there> <is|will be> {0}<. Plan it|. Put it into the calendar>@end",
                "<my plan|the plan|a new event|an event>: {0} on {1} at {2}@end",
                "@do<make|create|plan> an event {0} <on|for> {1} at {2}@end",
            ],
            ["Please plan {0} on {1} at {2}."],
        ),
        more=told("<puts|plans|adds|writes> an event <on a day|into the calendar>@end"),
    ),
)
