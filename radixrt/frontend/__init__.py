"""The HTTP front end: OpenAI's API, Anthropic's and the native one. Each process tokenizes; the router gets token ids.

app           routes, keys, body limit, errors; with it
  guard         what the routes of all APIs share
  about         models, report, metrics, health, version
  native        the native API
  workers       workers that are told to leave
  tokenization  text to ids and back
schema        OpenAI's requests as messages, pure; with it
  history       the messages of a chat, checked
  tools         which tools an answer may or must call
  structured    what its text must be
output        these in the format of the served model: a Grammar for the worker, a parser for each choice
anthropic/    Anthropic's Messages API: its own schema, routes, exchange and replies, everything else as here
responses/    OpenAI's Responses API: its own schema, routes, exchange and replies, and stored responses
parsing/      the formats of models: text in; content, reasoning and tool calls out
prompts       prepares the prompts of a request: token ids, sampling, and how their answers are parsed
generation    runs a request: prepare, send to the router, answer, remember
link          the connection to the router
exchange      one request in flight: gathers or streams its choices
choice        one choice: its text so far, as an assistant's message (message), and its exact ids
mailbox       bytes to be sent, until the client reads them
replies       messages and parts of them as OpenAI's JSON, pure
answer        ASGI responses: streams and whole answers
server        the process
"""
