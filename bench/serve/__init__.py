"""Benchmarks a server under seven loads, over HTTP; any server with OpenAI's API. See `__main__`."""
