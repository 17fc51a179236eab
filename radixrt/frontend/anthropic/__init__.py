"""Anthropic's Messages API, with the same ChatPrompt, ToolUse, Sampling and Exchange as OpenAI's chat.

routes       the handlers: create, count
schema       validates a request, and converts it to messages, pure; with it
  history      its system blocks and messages
  blocks       the content of blocks as text
  hosted       calls of tools that Anthropic ran
  tools        which tools an answer may or must call
  defined      tools whose schema Anthropic defines and that the client runs
  caching      `cache_control`: which tokens a breakpoint pins
exchange     one request in flight
replies      an answer as Anthropic's JSON: content blocks, events of a stream, usage; pure
errors       errors in Anthropic's format
"""
