"""OpenAI's Responses API, with the same ChatPrompt, ToolUse, Sampling and Exchange as chat.

routes       the handlers: create, get, delete
schema       validates a request, and converts it to messages, pure; with it
  history      its input items, with
    hosted     those of tools that OpenAI runs
store        stored responses, which a request may continue
exchange     one request in flight
replies      an answer as output items, and the events of a stream; pure
"""
