"""HTTP on the runtime: OpenAI's API, Anthropic's and the native one. Each process tokenizes; the router sees ids only.

app        routes, keys, body limit, errors
schema     OpenAI's requests as messages, pure; with it
  history      the messages of a chat, checked
  tools        which tools an answer may or must call
  structured   what its text must be
output     these in the format of the model that is served: a Grammar for the worker, a parser for each choice
anthropic/ Anthropic's Messages API: its own schema, exchange and replies, all else as here
responses/ OpenAI's Responses API: its own schema, exchange and replies, and what it keeps
parsing/   the formats: text in; content, reasoning and tool calls out
choice     one choice: what it says so far, as an assistant's message (message), and its exact ids
answer     one HTTP request in flight: gathers or streams its choices
replies    messages and pieces of them as OpenAI's JSON, pure
server     the process
"""
