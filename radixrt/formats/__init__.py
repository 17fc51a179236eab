"""What an answer must be, and what it is, in the served model's format. Front ends use it, and the router for programs.

output      for one prompt: a Grammar for the worker, a parser for each choice
tools       the tools of a request, and which of them an answer may or must call
deferred    tools that are hidden until a search finds them
structured  constraints: the fields of OpenAI, vLLM and SGLang as one Grammar
message     an assistant's message, built from pieces
parsing/    the formats of models: text in; content, reasoning and tool calls out
"""
