"""Ollama's API, with the same ChatPrompt, ToolUse, Sampling and Exchange as OpenAI's chat.

routes       the handlers: chat, generate, show, tags, version, and those that are not served
schema       validates a request, and converts it to messages, pure; with it
  history      its messages, with ids for their calls
exchange     one request in flight
replies      an answer as Ollama's JSON: whole, or line by line; pure
about        models as Ollama's JSON; pure
"""
