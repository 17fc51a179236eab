"""Anthropic's Messages API on the same runtime: the same ChatPrompt, ToolUse, Sampling and Exchange as OpenAI's chat.

routes       the handlers: create, count
schema       a request, checked and turned into messages, pure; with it
  history      its system blocks and messages
  blocks       what is in them, as text
  hosted       in them: calls of tools that Anthropic ran
  tools        which tools an answer may or must call
  defined      those whose schema Anthropic defines and the client runs
  caching      its `cache_control`: which tokens a breakpoint pins
exchange     one request in flight
replies      an answer as Anthropic's JSON: content blocks, events of a stream, usage; pure
errors       refusals in Anthropic's format
"""
