"""Serving under seven loads, over HTTP, against any endpoint that speaks OpenAI's API. `__main__` says how."""
