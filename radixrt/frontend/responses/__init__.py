"""OpenAI's Responses API on the same runtime: the same ChatPrompt, ToolUse, Sampling and Exchange as chat.

routes       the handlers: create, get, delete
schema       a request, checked and turned into messages, pure; with it
  history      its input items, with
    hosted     those of tools that OpenAI runs
store        responses that a request may go on from
exchange     one request in flight
replies      an answer as output items, and the events of a stream; pure
"""
