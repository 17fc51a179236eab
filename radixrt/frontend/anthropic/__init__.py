"""Anthropic's Messages API on the same runtime: the same ChatPrompt, ToolUse, Sampling and Exchange as OpenAI's chat.

schema       a request, checked and turned into messages, pure; with it
  history      its system blocks and messages
  tools        which tools an answer may or must call
  caching      its `cache_control`: which tokens a breakpoint pins
exchange     one request in flight
replies      an answer as Anthropic's JSON: content blocks, events of a stream, usage; pure
errors       refusals in Anthropic's format
"""
