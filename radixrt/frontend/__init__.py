"""HTTP on the runtime: OpenAI's API and the native one. Each process tokenizes itself; the router sees ids only.

app        routes, keys, body limit, errors
schema     OpenAI's requests as messages, pure
replies    Deltas as OpenAI's JSON, pure
answer     one HTTP request in flight: gathers or streams
server     the process
"""
