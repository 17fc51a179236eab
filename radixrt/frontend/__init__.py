"""The HTTP front end: OpenAI's, Anthropic's, Ollama's and the native API. Each process tokenizes; the router gets ids.

server      the process: uvicorn, with the application
app         the application: the routes of all APIs
http/       connections, bodies, keys, errors, and the routes that are no API's
openai/     completions and chats, tokenize, LoRA adapters: each API has its schema, replies and exchange
responses/  OpenAI's Responses API, with stored responses
anthropic/  Anthropic's Messages API
ollama/     Ollama's API
native/     messages of `radixrt.messages` as JSON
generate/   one generation, of any API
  request     the base of the APIs' requests: what they share, and its conversion to messages
  prepare     the prompts of a request: token ids, sampling, and how their answers are parsed
  generation  runs a request: prepare, send to the router, answer, remember
  exchange    one request in flight: gathers or streams its choices
  choice      one choice: its text so far, as an assistant's message, and its exact ids
"""
