"""HTTP on the runtime: OpenAI's API, Anthropic's and the native one. Each process tokenizes; the router sees ids only.

app           routes, keys, body limit, errors; with it
  guard         what the routes of all APIs share
  about         what a server says of itself
  native        the native API
  tokenization  text to ids and back
schema        OpenAI's requests as messages, pure; with it
  history       the messages of a chat, checked
  tools         which tools an answer may or must call
  structured    what its text must be
output        these in the format of the model that is served: a Grammar for the worker, a parser for each choice
anthropic/    Anthropic's Messages API: its own schema, routes, exchange and replies, all else as here
responses/    OpenAI's Responses API: its own schema, routes, exchange and replies, and what it keeps
parsing/      the formats: text in; content, reasoning and tool calls out
prompts       the prompts of a request, ready to be asked: ids, and what their answers may be
generation    a request on its way: prepared, sent to the router, answered, remembered
link          the connection to the router
exchange      one request in flight: gathers or streams its choices
choice        one choice: what it says so far, as an assistant's message (message), and its exact ids
mailbox       what is to be sent, until the client takes it
replies       messages and pieces of them as OpenAI's JSON, pure
answer        ASGI responses: streams and whole answers
server        the process
"""
